// Package failover decides when a replica starts an election before raft's own timers would, and
// which replica becomes the candidate. It is a state machine over messages and time. It starts no
// goroutine, opens no connection and reads no clock: package replica passes in the current time,
// the state of raft as a View, and the messages of the other voters.
//
// # Decisions
//
//   - Silent leader (Watch): all followers check exactly when the leader is overdue,
//     HeartbeatTimeout after its last contact with any of them. The follower with the best log
//     checks last.
//   - Exited leader (ExitProbe): a process has exited if its port refuses connections and none of
//     its connections to this replica is open.
//   - Candidate choice (Pledge, Campaign, Tally): a follower that has found its leader exited
//     requests a pledge from all other voters. With the pledges of a majority, its own included, it
//     becomes a candidate immediately.
//   - Leadership transfer (Successor, CheckTimeoutNow): the leader selects a voter that responds
//     and has a nearly complete log and a working disk. The target obeys only its current leader.
//
// A campaign for an exited leader L by follower C proceeds in these steps:
//
//	Follower of L ─ ExitProbe finds L exited ─▶ Campaign
//	  round 1: request a pledge of PledgeDuration from every other voter
//	  round 2: request its confirmation for ElectionPledge (if a majority is more than two voters)
//	  a majority has pledged ─▶ C sends TimeoutNow to itself ─▶ raft candidate ─▶ votes
//	  no majority           ─▶ wait one PledgeDuration for each voter with a better log, start again
//	  a contact of the leader, a new leader, or 3/4 of HeartbeatTimeout since the contact ─▶ stop
//
// # Safety
//
// raft's safety does not depend on this package: a candidate still needs the votes of a majority in
// a new term. A wrong decision causes an unnecessary election, or deposes a running leader once.
//
// # Invariants
//
// The model test explores runs of three and five voters. Messages are delivered, lost, delayed and
// reordered. Processes exit and start, disks stall, and ports refuse. It checks:
//
//  1. One pledge: while a pledge for a leader lasts, its voter pledges itself to no other candidate
//     for the same leader. A repeated request of the same candidate never shortens it
//     (Pledge.Grant).
//  2. One confirmed candidate: after a candidate is confirmed for a leader, no other candidate is
//     confirmed for the same leader in the same term for ElectionPledge less RequestTimeout. It
//     follows from 1, because two majorities share a voter.
//  3. Electable: a voter pledges itself only to a voter with a log that is not worse than its own,
//     so that raft's check of the logs does not refuse the vote (Pledge.AnswerRequest).
//  4. Evidence: a voter starts a campaign, or grants a request of the first round, only after it
//     has found the leader's process exited itself. While one of the leader's connections to this
//     voter is open, the voter does not find it exited (ExitProbe.Observe).
//  5. A living leader is not replaced: while it keeps its connections to so many voters that, with
//     itself, they are a majority, no candidate is confirmed for it. It follows from 4.
//  6. No late candidacy: a voter pledges itself to another replica only in the place of the leader
//     that it follows. A replica that no longer follows the leader that it was to replace, or that
//     is a candidate or leader, refuses its own TimeoutNow. It refuses the TimeoutNow of every
//     other replica that is not its current leader (CheckTimeoutNow).
//  7. A replica without a vote starts no campaign and receives no pledge.
//  8. A replica with a disk write that has been pending for more than MaxPendingWrite starts no
//     round of a campaign, obeys no TimeoutNow and is not selected as successor. It could not write
//     its own vote.
//  9. No early check: a follower checks a silent leader only when HeartbeatTimeout has passed since
//     the last contact known to it or reported by a voter that responds in time (Watch).
//  10. Progress: raft checks a leader that has exited or vanished at most one stagger per voter
//     after HeartbeatTimeout. Of three voters, a candidate is confirmed before HeartbeatTimeout if
//     the leader's process exits while the other two run and their messages are delivered.
//
// # Limits
//
// A pledge is kept in memory: a voter that is started again may pledge itself a second time. But
// after its start it follows no leader, and refuses all requests until it has observed a leader.
//
// A confirmed candidate is unique until its pledges expire. ElectionPledge is half of
// HeartbeatTimeout and a response counts for RequestTimeout. With a HeartbeatTimeout below 400 ms a
// pledge may expire before its response is counted, and two candidates may be confirmed. raft's
// votes then decide.
//
// Of five voters, two campaigns may block each other until HeartbeatTimeout. A campaign with the
// pledges of a majority cannot win while its own voter is pledged to a candidate with a better log.
// It then renews the pledges that the better candidate lacks.
//
// A TimeoutNow that is delayed on its way is obeyed while its target still follows the sender. This
// is the transfer that the sender has requested, although its request may have timed out. A
// TimeoutNow to itself is obeyed again if the leader that it was to replace has been elected again.
package failover
