package bugs

// table lists the bugs. Each is a failure that some replicated store has had.
//
// Most of them are also found by random clients and the checker of their history
// (storetest/linear), which have no knowledge of the bug. They run on a cluster under faults with a
// fixed seed, which needs some luck. For bugs above raft they run on a store in memory with
// leadership changes and compactions. Three bugs are not found by them, or not reliably within
// seconds:
//
//   - A lost TTL shows at a replica that received a snapshot in which nearly all history is
//     compacted; everything else is replayed from the history and has its TTL.
//   - A snapshot without the dedup table needs a commit with a lost response, and then a leader
//     whose state came from a snapshot with this commit, within the three seconds for which the
//     commit is retried: two faults at once, at the right time.
//   - A restore discards what was acknowledged after the backup, which is its purpose; the checker
//     would reject a correct restore too.
var table = []bug{
	// First, because its test stops after a minute.
	{
		name: "connection that a cut has left dead", file: "raftstore/replica/network.go",
		old: "	net.peers.Initialize(n.cfg.Network.ClientTLS, peernet.WithUserTimeout(n.cfg.Network.Dial))\n",
		new: "	net.peers.Initialize(n.cfg.Network.ClientTLS, n.cfg.Network.Dial)\n	_ = " +
			"peernet.WithUserTimeout\n",
		finder:  "./raftstore/replica:TestFollowerGivesUpWhatACutHolds",
		symptom: "after a cut a follower's calls hang for as long again",
	},
	{
		name: "stale read after a pause", file: "raftstore/replica/read.go",
		old:     "	if !l.confirm.ConfirmLeader(r.confirmerLeadership(l), r.node.currentVoters()) {",
		new:     "	if false && !l.confirm.ConfirmLeader(r.confirmerLeadership(l), r.node.currentVoters()) {",
		finder:  "./raftstore/replica:TestSleepyLeaderReadsNothingStale",
		symptom: "a leader slow to notice that it is deposed answers reads",
		harness: "./raftstore/replica:TestLinearizable -linear.replicas=3 -linear.for=6s " +
			"-linear.only=isolate.the.leader|leader.in.the.minority",
		harnessNeedsLuck: true,
	},
	{
		name: "fence ignored", file: "raftstore/mvcc/machine.go",
		old:     "	if p.GetFence() != 0 && p.GetFence() != term {",
		new:     "	if false {",
		finder:  "./raftstore/storetest:TestMemoryConforms/Fences",
		symptom: "a commit under the fence of another leadership changes the state",
		harness: "./raftstore/storetest/linear:TestGoodStorePassesInUnrest",
	},
	{
		name: "double apply on retry", file: "raftstore/mvcc/recent.go",
		old:              "		if at, ok := inc.findSequence(id.GetSequence()); ok {",
		new:              "		if at, ok := inc.findSequence(id.GetSequence()); ok && at < 0 {",
		finder:           "./raftstore/replica:TestLostReplyAppliesOnce",
		symptom:          "a retry after a lost reply makes a second revision",
		harness:          "./raftstore/replica:TestLinearizable -linear.replicas=3 -linear.for=6s",
		harnessNeedsLuck: true,
	},
	{
		name: "gap between list and watch", file: "raftstore/watch/hub.go",
		old:     "	if after < h.revision {\n		if _, err",
		new:     "	if after = max(after, h.revision); after < h.revision {\n		if _, err",
		finder:  "./raftstore/storetest:TestMemoryConforms/WatchAgain",
		symptom: "a watch from a list's revision misses what came between",
		harness: "./raftstore/storetest/linear:TestGoodStorePassesInUnrest",
	},
	{
		name: "gap between history and live events", file: "raftstore/watch/hub.go",
		old:     "	if w.cursor < h.revision {\n		return false\n	}",
		new:     "",
		finder:  "./raftstore/watch:TestNothingFallsBetweenHistoryAndLive",
		symptom: "a watcher that catches up joins the live ones too early",
	},
	{
		name: "watch without the event of an installed snapshot", file: "raftstore/watch/hub.go",
		old:     "		if w.synced && w.cursor < revision {\n			h.startCatchUp(w)",
		new:     "		if w.synced && w.cursor < revision {\n			w.cursor = revision",
		finder:  "./raftstore/watch:TestWatchGoesOnThroughReset",
		symptom: "a watch at a replica that got a snapshot has a gap",
	},
	{
		name: "compaction racing a watch", file: "raftstore/mvcc/view.go",
		old: "	if after < v.history.compacted {\n		return nil, fmt.Errorf(\"history after",
		new: "	if after < v.history.compacted {\n		after = v.history.compacted\n	}\n	if after < " +
			"v.history.compacted {\n		return nil, fmt.Errorf(\"history after",
		finder:  "./raftstore/storetest:TestMemoryConforms/Compaction",
		symptom: "a watch goes on behind the compacted stretch as if nothing were missing",
		harness: "./raftstore/storetest/linear:TestGoodStorePassesInUnrest",
	},
	{
		name: "compaction swallows its own batch", file: "raftstore/mvcc/machine.go",
		old:     "	m.collectEvents()\n	if upTo > m.revision {",
		new:     "	m.collectedUpTo = max(m.collectedUpTo, min(upTo, m.revision))\n	if upTo > m.revision {",
		finder:  "./raftstore/mvcc:TestCompactionInTheSameBatch",
		symptom: "events applied together with the compaction never come out",
	},
	{
		name: "lost TTL", file: "raftstore/mvcc/snapshot.go",
		old:     "		if it.Expires != 0 {\n			l.m.deadlines",
		new:     "		if false {\n			l.m.deadlines",
		finder:  "./raftstore/mvcc:TestAgreesWithTwin -rapid.nofailfile",
		symptom: "keys loaded from a snapshot do not expire any more",
	},
	{
		name: "snapshot without dedup table", file: "raftstore/mvcc/snapshot.go",
		old:     "	for e := s.recent.uses.Front(); e != nil; e = e.Next() {",
		new:     "	for e := s.recent.uses.Front(); e != nil && false; e = e.Next() {",
		finder:  "./raftstore/mvcc:TestRetryAppliesOnce",
		symptom: "a retry after a snapshot applies a second time",
	},
	{
		name: "forwarded write applied twice", file: "raftstore/replica/forward.go",
		old:              "		items[i] = proposals.NewItem(p)\n",
		new:              "		p.Id = s.r.commits.ids.NextID()\n		items[i] = proposals.NewItem(p)\n",
		finder:           "./raftstore/replica:TestLostReplyAppliesOnce",
		symptom:          "a write forwarded to two leaders is two writes",
		harness:          "./raftstore/replica:TestLinearizable -linear.replicas=3 -linear.for=6s",
		harnessNeedsLuck: true,
	},
	{
		name: "follower serving before replay", file: "raftstore/replica/read.go",
		old:              "			if err := r.node.fsm.Line.AwaitIndex(ctx, at.Index); err != nil {",
		new:              "			if err := ctx.Err(); err != nil {",
		finder:           "./raftstore/replica:TestReadsWaitForReplay",
		symptom:          "a replica that just started shows the state of its beginning",
		harness:          "./raftstore/replica:TestLinearizable -linear.replicas=3 -linear.for=6s",
		harnessNeedsLuck: true,
	},
	{
		name: "revision going back after restore", file: "raftstore/disk/restore.go",
		old: "	if err := machine.Rebase(RestoreBase(max(machine.View().Revision(), o.Above), " +
			"o.currentTime())); err != nil {",
		new:     "	if err := machine.Rebase(machine.View().Revision() + 1); err != nil {",
		finder:  "./raftstore/replica:TestBackupAndRestore",
		symptom: "a restored store hands out revisions of the old one again",
	},
	{
		name: "new leader serving before its barrier", file: "raftstore/replica/lead.go",
		old: "	for l.ctx.Err() == nil {\n		future",
		new: "	_, _ = t.node.proposeCommand(&storev1.Command{Kind: &storev1.Command_Batch{Batch: " +
			"&storev1.Batch{}}})\n" +
			"	for l.term = t.node.raft.CurrentTerm(); l.term == 0; {\n		future",
		finder:  "./raftstore/replica:TestNewLeaderReadsWhatTheOldAcknowledged",
		symptom: "it does not know yet what the old leader has committed",
	},
	{
		name: "acknowledged after a failed flush", file: "raftstore/disk/journal/journal.go",
		old:     "	_, err := f.WriteAt(b, j.end)\n	if err == nil {\n		err = f.Sync()",
		new:     "	_, err := f.WriteAt(b, j.end)\n	if err == nil {\n		_ = f.Sync()",
		finder:  "./raftstore/disk/journal:TestFailedFlushIsNoAppend",
		symptom: "an append that did not reach the disk is reported as done",
	},
	{
		name: "torn journal record accepted", file: "raftstore/disk/journal/record.go",
		old:     "		if state != sector.Valid || piece.Run != s.Run || piece.Number != s.Number+uint64(i) {",
		new:     "		if _ = piece; state == sector.Damaged {",
		finder:  "./raftstore/disk/journal:TestTornRecordIsDropped",
		symptom: "half a record is taken for a whole one",
	},
	{
		name: "damage taken for the end of the journal", file: "raftstore/disk/journal/record.go",
		old:     "		case sector.Damaged:\n			return c,",
		new:     "		case sector.Damaged:\n			continue\n			return c,",
		finder:  "./raftstore/disk/journal:TestJournalFindsDamage",
		symptom: "an acknowledged record that went bad is dropped without a word",
	},
	{
		name: "what was sent counts as taken", file: "raftstore/replica/replication/early.go",
		old: "	if len(req.Entries) == 0 || s.over || s.held < last || s.claimed != req.PrevLogEntry " +
			"{\n		return false\n	}\n	s.claimed = last\n	*resp = s.answer\n",
		new: "	if len(req.Entries) == 0 || s.sent < last {\n		return false\n	}\n	s.claimed = last\n" +
			"	*resp = raft.AppendEntriesResponse{Term: req.Term, Success: true}\n",
		finder:  "./raftstore/replica/replication:TestEarlyAnswersAreTrue",
		symptom: "raft counts entries as stored by a peer that never received them",
	},
	{
		name: "commit index beyond the request", file: "raftstore/replica/replication/early.go",
		old:     "	req.LeaderCommitIndex = min(commit, s.sent)\n",
		new:     "	req.LeaderCommitIndex = commit\n",
		finder:  "./raftstore/replica/replication:TestEarlyAnswersAreTrue",
		symptom: "a peer takes entries of another leader for committed",
	},
}
