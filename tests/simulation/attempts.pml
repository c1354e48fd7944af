/* Rounds from one state, one after the other, as docs/protocol.md has them ("Locks"), in every order of events.

   N members make up to K groups. A member signs one join after the other, each with what it voted for last; a group is
   any quorum of those who have signed for it, as they come; its average is a new one, or what its joins say was voted
   for before. A member may be slow to begin, leave a round at any time, or die: whatever it does next may never come. It
   steps when a quorum has voted, of which it may hear at any time later, while it is in the round.

   Checked: no two members step with unlike averages. test_model.py says with which sizes. FORGET is the rule as it was
   before there were locks; UNTRIED numbers a round after the last one with a vote, not after the last one in which one
   of its members was. With LIES the last of N members lies: it votes for everything, and says of its votes what it
   likes. Against one that has voted and says that it did not no rule helps: the model finds how a step is lost. */
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
byte number[K];       /* of the round among those from the state */
byte value[K];        /* the average: the group that made it first, and one */
byte said_last[K * N], said_at[K * N], said_for[K * N]; /* in the joins: see Lock */

byte place[N];        /* the group for which i has signed last, and one; 0 while it is in none */
byte last[N], at[N], lock[N];
byte made[N];

/* The average of a new group g: of what more than F say, the latest. */
inline form(g, some) {
  d_step {
    members[g] = some; number[g] = 0; best = 0; value[g] = g + 1;
    j = 0;
    do
    :: j < N ->
       if
       :: IN(j, some) ->
#ifdef UNTRIED
          if :: said_at[AT(g, j)] > number[g] -> number[g] = said_at[AT(g, j)] :: else fi
#else
          if :: said_last[AT(g, j)] > number[g] -> number[g] = said_last[AT(g, j)] :: else fi
#endif
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
       first = 0; second = 0; j = 0;
       do
       :: j < N ->
          if
          :: IN(j, some) && said_for[AT(g, j)] == v ->
             if
             :: said_at[AT(g, j)] > first -> second = first; first = said_at[AT(g, j)]
             :: else -> if :: said_at[AT(g, j)] > second -> second = said_at[AT(g, j)] :: else fi
             fi
          :: else
          fi;
          j++
       :: else -> break
       od;
       if :: F == 1 -> first = second :: else fi;
       if :: first > best -> best = first; value[g] = v :: else fi;
       v++
    :: else -> break
    od;
#endif
    joined[g] = 0; j = 0; /* nobody looks at the joins any more */
    do :: j < N -> said_last[AT(g, j)] = 0; said_at[AT(g, j)] = 0; said_for[AT(g, j)] = 0; j++ :: else -> break od;
    best = 0; first = 0; second = 0; v = 0; j = 0
  }
}

proctype Member(byte i) {
  byte g, j, v, best, first, second, some;
  do
  :: made[i] -> break
  :: atomic {
       !made[i] && place[i] == 0 ->
       if :: g = 0 :: K > 1 -> g = 1 :: K > 2 -> g = 2 :: K > 3 -> g = 3 fi;
       if
       :: !members[g] && !IN(i, joined[g]) && (g == 0 || joined[g - 1] || members[g - 1]) ->
          joined[g] = joined[g] | (1 << i); place[i] = g + 1;
          said_last[AT(g, i)] = last[i]; said_at[AT(g, i)] = at[i]; said_for[AT(g, i)] = lock[i]
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
       if
       :: some = some | LIAR;
          if
          :: said_for[AT(g, HONEST)] = g; said_at[AT(g, HONEST)] = K + 1 /* for what may have been voted for, or not */
          :: said_for[AT(g, HONEST)] = 0; said_at[AT(g, HONEST)] = 0
          fi
       :: skip
       fi;
#endif
       j = 0;
       if :: IN(i, some) && size[some] >= QUORUM -> form(g, some) :: else fi;
       some = 0; g = 0
     }
  :: atomic {
       !made[i] && place[i] != 0 && IN(i, members[place[i] - 1]) && !IN(i, began[place[i] - 1]) ->
       g = place[i] - 1; began[g] = began[g] | (1 << i); last[i] = number[g]; g = 0
     }
  :: atomic { /* the whole average is there when all reducers have begun */
       !made[i] && place[i] != 0 && IN(i, began[place[i] - 1]) && !IN(i, votes[place[i] - 1]) &&
       (value[place[i] - 1] != place[i] || (began[place[i] - 1] | LIAR) == (members[place[i] - 1] | LIAR)) ->
       g = place[i] - 1; votes[g] = votes[g] | (1 << i); at[i] = number[g]; lock[i] = value[g]; g = 0
     }
  :: atomic {
       !made[i] && place[i] != 0 && IN(i, began[place[i] - 1]) ->
       g = place[i] - 1;
       if
       :: size[votes[g]] + N - HONEST >= QUORUM -> made[i] = value[g];
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
