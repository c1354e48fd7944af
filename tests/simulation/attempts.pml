/* Rounds from one state, one after the other, as docs/protocol.md has them ("Locks"), in every order of events.

   N members make up to K groups. A member signs one join after the other, and shows with it the votes that it saw before
   it precommitted; a group is any quorum of those who have signed for it, as they come; its average is a new one, or
   the one for which its members were shown to have voted. A member may be slow to begin, leave a round at any time, or
   die: whatever it does next may never come. It precommits when a quorum has voted, and steps when a quorum has
   precommitted, of which it may hear at any time later, while it is in the round.

   Checked: no two members step with unlike averages. Members are alike and what others do does not depend on who has
   stepped: so members 0 and 1 are the two, in this order, and nobody else need step. test_model.py says with which
   sizes. With LIES the last of N members lies: it votes for and precommits everything, says of its own votes what it
   likes, shows any others or none, and leads: so votes that members have shown are left out. Rules that are needed,
   each left out by its name: FORGET, votes that are shown; BELIEVE, that a member refuses a group without the votes
   that it has shown; ONCE, precommits: who hears of a quorum's votes steps, and shows these. */
#ifndef N
#define N 3
#endif
#ifndef K
#define K 3
#endif
#ifdef LIES
#define HONEST (N - 1)
#define LIAR (1 << HONEST)
#else
#define HONEST N
#define LIAR 0
#endif
#define F ((N - 1) / 3)
#define QUORUM ((N + F) / 2 + 1)
#define IN(j, set) ((set >> (j)) & 1)
#define AT(g, i) ((g) * N + (i))

byte size[16];
byte joined[K];       /* who has signed a join for the group */
byte members[K];      /* of a group that has formed */
byte began[K];        /* of these, who has */
byte votes[K];        /* of these, who has */
byte sure[K];         /* of these, who has precommitted */
byte number[K];       /* of the round among those from the state */
byte value[K];        /* the average: the group that made it first, and one */
byte rank[K];         /* the attempt of the votes for which it is repeated, 0 for a new one */
byte said_last[K * N], said_at[K * N], said_for[K * N], said_seen[K * N]; /* in the joins, and shown with them */

byte place[N];        /* the group for which i has signed last, and one; 0 while it is in none */
byte last[N], at[N], lock[N], seen[N];
byte made[N];

/* The average of a new group g: of what more than F were shown to have voted for, the latest. */
inline form(g, some) {
  d_step {
    members[g] = some; number[g] = 0; best = 0; value[g] = g + 1;
    j = 0;
    do
    :: j < N ->
       if
       :: IN(j, some) ->
          if :: said_last[AT(g, j)] > number[g] -> number[g] = said_last[AT(g, j)] :: else fi
       :: else
       fi;
       j++
    :: else -> break
    od;
    number[g]++;
#ifndef FORGET
    v = 1;
    do
    :: v <= K ->
       first = 0; j = 0;
       do /* what one shows are votes of one attempt */
       :: j < N ->
          if
          :: IN(j, some) && said_for[AT(g, j)] == v && said_at[AT(g, j)] > first &&
             size[(said_seen[AT(g, j)] | added) & some] > F -> first = said_at[AT(g, j)]
          :: else
          fi;
          j++
       :: else -> break
       od;
       if :: first > best -> best = first; value[g] = v :: else fi;
       v++
    :: else -> break
    od;
#endif
    rank[g] = best;
    joined[g] = 0; j = 0; /* nobody looks at the joins any more */
    do
    :: j < N -> said_last[AT(g, j)] = 0; said_at[AT(g, j)] = 0; said_for[AT(g, j)] = 0; said_seen[AT(g, j)] = 0; j++
    :: else -> break
    od;
    best = 0; first = 0; v = 0; j = 0
  }
}

/* What i has shown is what the group repeats, or that is of a later attempt. */
#ifdef FORGET
#define BELIEVE
#endif
#ifdef BELIEVE
#define REFUSES(g, i) 0
#else
#define REFUSES(g, i) (lock[i] && size[seen[i] & members[g]] > F && value[g] != lock[i] && rank[g] <= at[i])
#endif

proctype Member(byte i) {
  byte g, j, v, best, first, some, added;
  do
  :: made[i] -> break
  :: atomic {
       !made[i] && place[i] == 0 ->
       if :: g = 0 :: K > 1 -> g = 1 :: K > 2 -> g = 2 :: K > 3 -> g = 3 fi;
       if
       :: !members[g] && !IN(i, joined[g]) && (g == 0 || joined[g - 1] || members[g - 1]) ->
          joined[g] = joined[g] | (1 << i); place[i] = g + 1;
          said_last[AT(g, i)] = last[i]; said_at[AT(g, i)] = at[i]; said_for[AT(g, i)] = lock[i];
          said_seen[AT(g, i)] = seen[i]
       :: else
       fi;
       g = 0
     }
  :: atomic { /* the group forms, of whom its leader will */
       !made[i] && place[i] != 0 && !members[place[i] - 1] ->
       g = place[i] - 1; some = 0; j = 0;
       do
       :: j < HONEST -> if :: IN(j, joined[g]) -> some = some | (1 << j) :: skip fi; j++
       :: else -> break
       od;
#ifdef LIES
       if :: some = some | LIAR :: skip fi;
#endif
       j = 0;
       if
       :: IN(i, some) && size[some] >= QUORUM ->
#ifdef LIES
          if
          :: some & LIAR ->
             do /* as it leads it leaves out what it will, and adds its own vote where it will */
             :: j < HONEST ->
                if
                :: IN(j, some) && said_for[AT(g, j)] ->
                   if :: said_for[AT(g, j)] = 0 :: skip fi
                :: else
                fi;
                j++
             :: else -> break
             od;
             if :: added = LIAR :: skip fi;
             if
             :: v = 0 /* shows nothing */
             :: v < g -> v++; /* or the votes of an earlier group, whatever came of it */
                if :: v < g -> v++ :: skip fi;
                said_for[AT(g, HONEST)] = value[v - 1]; said_at[AT(g, HONEST)] = number[v - 1];
                said_seen[AT(g, HONEST)] = votes[v - 1]; v = 0
             fi;
             j = 0
          :: else
          fi;
#endif
          form(g, some)
       :: else
       fi;
       some = 0; added = 0; g = 0
     }
  :: atomic {
       !made[i] && place[i] != 0 && IN(i, members[place[i] - 1]) && !IN(i, began[place[i] - 1]) &&
       !REFUSES(place[i] - 1, i) ->
       g = place[i] - 1; began[g] = began[g] | (1 << i); last[i] = number[g]; g = 0
     }
  :: atomic { /* the whole average is there when all reducers have begun */
       !made[i] && place[i] != 0 && IN(i, began[place[i] - 1]) && !IN(i, votes[place[i] - 1]) &&
       (value[place[i] - 1] != place[i] || (began[place[i] - 1] | LIAR) == (members[place[i] - 1] | LIAR)) ->
       g = place[i] - 1; votes[g] = votes[g] | (1 << i); g = 0
     }
  :: atomic { /* it has seen the votes of a quorum, which that is */
       !made[i] && place[i] != 0 && IN(i, began[place[i] - 1]) && !IN(i, sure[place[i] - 1]) &&
       size[votes[place[i] - 1] | LIAR] >= QUORUM ->
       g = place[i] - 1; some = 0; j = 0;
#ifdef LIES
       if :: some = LIAR :: skip fi;
#endif
       do
       :: j < HONEST -> if :: IN(j, votes[g]) -> some = some | (1 << j) :: skip fi; j++
       :: else -> break
       od;
       if
       :: size[some] == QUORUM ->
          sure[g] = sure[g] | (1 << i); at[i] = number[g]; lock[i] = value[g]; seen[i] = some
       :: else
       fi;
       some = 0; j = 0; g = 0
     }
  :: atomic {
       i < 2 && (i == 0 || made[0]) && !made[i] && place[i] != 0 && IN(i, began[place[i] - 1]) ->
       g = place[i] - 1;
       if
#ifdef ONCE
       :: IN(i, sure[g]) -> made[i] = value[g];
#else
       :: size[sure[g] | LIAR] >= QUORUM -> made[i] = value[g];
#endif
          j = 0;
          do :: j < HONEST -> assert(!made[j] || made[j] == made[i]); j++ :: else -> break od;
          j = 0
       :: else
       fi;
       g = 0
     }
  :: atomic { !made[i] && place[i] != 0 -> place[i] = 0 }
  od
}

init {
  byte i;
  atomic {
    i = 1;
    do :: i < 16 -> size[i] = size[i >> 1] + (i & 1); i++ :: else -> break od;
    i = 0;
    do :: i < HONEST -> run Member(i); i++ :: else -> break od
  }
}
