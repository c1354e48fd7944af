/* One round as docs/protocol.md has it, in every order of events: group, transfer, votes, repetition, commit or drop.

   N members, the last of whom lies where LIES is defined: as a reducer it signs two averages, 1 and 2, for whom it
   likes, and votes for whatever the one who asks is to believe; as LEADER it tells each member another group. Any
   message may be lost, and any member may do nothing more, at any time: so does who drops the round, or dies. What
   honest reducers make is the same for all members of a group, so the liar's part stands for the whole average.

   With BACKUP all may be honest, and 1 is what a reducer signed that dies or seems to, 2 what its backups signed in the
   repetition of its part. Any member may have heard of either first, and believe in the death or not.

   Checked: no two honest members step with unlike averages. Members are alike and what others do does not depend on who
   has stepped: so members 0 and 1 are the two, in this order, and nobody else need step. tests/simulation/test_model.py says with which sizes, and
   that each rule is needed: HEARD counts who answered instead of votes, HALF takes half for a quorum, FEW and GROUP
   have a quorum of the group vote, of which with FEW less than a third may lie; TWICE lets who has voted for what the reducer
   signed vote in the repetition too. */
#ifndef N
#define N 4
#endif
#ifdef LIES
#define HONEST (N - 1)
#else
#define HONEST N
#endif
#define LIAR HONEST
#define OPEN(i) (!made[i] && !dropped[i])
#define IN(j, set) ((set >> (j)) & 1)
#define QUORUM(n) ((n + F(n)) / 2 + 1)
#ifdef HALF
#define F(n) -1
#else
#define F(n) ((n - 1) / 3)
#endif

/* of whom a quorum must vote: where of the group, as many of it may lie as of it, or as of all */
#ifdef FEW
#define ENOUGH(votes, n) (2 * votes > n + F(n))
#else
#ifdef GROUP
#define ENOUGH(votes, n) (2 * votes > n + F(N))
#else
#define ENOUGH(votes, n) (2 * votes > N + F(N))
#endif
#endif

byte size[32];    /* of a set of members */
byte group[N];    /* the members of i's round, as i was told */
byte vote[N];     /* of i, once given: what it holds, or what it was shown that the reducer signed */
byte told[N];     /* whose votes i heard */
byte answered[N]; /* who answered i, whether they had a vote or not */
byte made[N];     /* the average with which i stepped */
bool dropped[N];

/* The votes for `value` and against it that i knows. The liar's is for whatever i is to believe. */
inline count(i, value) {
  j = 0;
  do
  :: j < HONEST ->
     if
     :: (j == i || IN(j, told[i])) && vote[j] == value -> votes++
     :: (j == i || IN(j, told[i])) && vote[j] == 3 - value -> others++
     :: else
     fi;
     if :: j == i || IN(j, answered[i]) -> heard++ :: else fi;
     j++
  :: else -> break
  od;
#ifdef LIES
  if :: IN(LIAR, group[i]) -> heard++; votes++ :: else fi
#endif
}

inline step(i, value) {
  d_step {
    votes = 0; others = 0; heard = 0;
    count(i, value);
#ifdef HEARD
    if
    :: votes > others && heard >= QUORUM(size[group[i]]) &&
       (!others || 2 * votes > votes + others + size[group[i]] - heard) -> made[i] = value
    :: else
    fi;
#else
    if :: ENOUGH(votes, size[group[i]]) -> made[i] = value :: else fi;
#endif
    j = 0;
    do
    :: j < i && made[i] -> assert(!made[j] || (group[i] == group[j] && made[i] == made[j])); j++
    :: else -> break
    od;
    votes = 0; others = 0; heard = 0; j = 0
  }
}

proctype Member(byte i) {
  byte j, votes, heard, others;
  do
#if defined(LIES) || defined(BACKUP)
  :: atomic { OPEN(i) && !vote[i] -> if :: vote[i] = 1 :: vote[i] = 2 fi }
#else
  :: atomic { OPEN(i) && !vote[i] -> vote[i] = 1 }
#endif
#ifdef TWICE
  :: atomic { OPEN(i) && vote[i] == 1 -> vote[i] = 2 }
#endif
  :: atomic {
       OPEN(i) ->
       if
       :: j = 0
       :: j = 1
       :: N > 2 -> j = 2
       :: N > 3 -> j = 3
       :: N > 4 -> j = 4
       fi;
       if
       :: j < HONEST && j != i && IN(j, group[i]) && group[j] == group[i] && !dropped[j] ->
#ifdef HEARD
          answered[i] = answered[i] | (1 << j);
#endif
          if :: vote[j] -> told[i] = told[i] | (1 << j) :: else fi
       :: else
       fi;
       j = 0
     }
  :: atomic { OPEN(i) && i < 2 && (i == 0 || made[0]) -> step(i, 1) }
  :: atomic { OPEN(i) && i < 2 && (i == 0 || made[0]) -> step(i, 2) }
  :: !OPEN(i) -> break
  od
}

init {
  byte i, k, some;
  atomic {
    i = 1;
    do :: i < 32 -> size[i] = size[i >> 1] + (i & 1); i++ :: else -> break od;
    i = 0;
    do
    :: i < HONEST ->
       some = 0; k = 0;
#ifdef LEADER
       do :: k < N -> if :: some = some | (1 << k) :: skip fi; k++ :: else -> break od;
#else
       some = (1 << N) - 1;
#endif
       /* a member takes no group without itself, or that is no quorum of the trainers */
       if :: IN(i, some) && size[some] >= QUORUM(N) -> group[i] = some :: else -> dropped[i] = true fi;
       i++
    :: else -> break
    od;
    i = 0; k = 0; some = 0;
    do :: i < HONEST -> run Member(i); i++ :: else -> break od
  }
}
