package bugs

// table is the bugs. Each is a failure that some replicated store has had.
//
// Most are also found by random clients and the checker of their history
// (storetest/linear), which know nothing of the bug: on a cluster under faults
// with a fixed seed, where it takes some luck, or for what is wrong above raft on a store in memory whose
// leadership changes and whose history is compacted. Three they do not see, or
// not within seconds every time:
//
//   - a lost TTL shows at a replica that got a snapshot in which nearly all history
//     is compacted; all else is replayed from the history and has its TTL;
//   - a snapshot without dedup table needs a commit whose answer was lost, and
//     then a leader whose state came from a snapshot that has this commit already,
//     within the three seconds for which the commit is tried: two faults at once, aimed;
//   - a restore takes back what was acknowledged after the backup, which is what it
//     is for; the checker would refuse a good one too.
var table = []bug{
	// The first, since its test gives up after a minute.
	{
		name: "connection that a cut has left dead", file: "raftstore/replica/replica.go",
		old:    "	r.peers.dial = giveUpUnheard(c.Dial)\n",
		new:    "	r.peers.dial = c.Dial\n",
		finder: "./raftstore/replica:TestFollowerGivesUpWhatACutHolds",
		how:    "after a cut a follower's calls hang for as long again",
	},
	{
		name: "stale read after a pause", file: "raftstore/replica/read.go",
		old:     "	if !l.confirm.ask(r, l, r.voters()) {",
		new:     "	if false && !l.confirm.ask(r, l, r.voters()) {",
		finder:  "./raftstore/replica:TestSleepyLeaderReadsNothingStale",
		how:     "a leader slow to notice that it is deposed answers reads",
		harness: "./raftstore/replica:TestLinearizable -linear.replicas=3 -linear.for=6s -linear.only=isolate.the.leader|leader.in.the.minority",
		perhaps: true,
	},
	{
		name: "fence ignored", file: "raftstore/mvcc/machine.go",
		old:     "	if p.GetFence() != 0 && p.GetFence() != term {",
		new:     "	if false {",
		finder:  "./raftstore/storetest:TestMemoryConforms/Fences",
		how:     "a commit under the fence of another leadership changes the state",
		harness: "./raftstore/storetest/linear:TestGoodStorePassesInUnrest",
	},
	{
		name: "double apply on retry", file: "raftstore/mvcc/recent.go",
		old:     "		if at, ok := inc.findSequence(id.GetSequence()); ok {",
		new:     "		if at, ok := inc.findSequence(id.GetSequence()); ok && at < 0 {",
		finder:  "./raftstore/replica:TestLostReplyAppliesOnce",
		how:     "a retry after a lost reply makes a second revision",
		harness: "./raftstore/replica:TestLinearizable -linear.replicas=3 -linear.for=6s",
		perhaps: true,
	},
	{
		name: "gap between list and watch", file: "raftstore/watch/hub.go",
		old:     "	if after < h.revision {\n		if _, err",
		new:     "	if after = max(after, h.revision); after < h.revision {\n		if _, err",
		finder:  "./raftstore/storetest:TestMemoryConforms/WatchAgain",
		how:     "a watch from a list's revision misses what came between",
		harness: "./raftstore/storetest/linear:TestGoodStorePassesInUnrest",
	},
	{
		name: "gap between history and live events", file: "raftstore/watch/hub.go",
		old:    "	if w.cursor < h.revision {\n		return false\n	}",
		new:    "",
		finder: "./raftstore/watch:TestNothingFallsBetweenHistoryAndLive",
		how:    "a watcher that catches up joins the live ones too early",
	},
	{
		name: "watch not told of an installed snapshot", file: "raftstore/watch/hub.go",
		old:    "		if w.synced && w.cursor < revision {\n			h.startCatchUp(w)",
		new:    "		if w.synced && w.cursor < revision {\n			w.cursor = revision",
		finder: "./raftstore/watch:TestWatchGoesOnThroughReset",
		how:    "a watch at a replica that got a snapshot has a gap",
	},
	{
		name: "compaction racing a watch", file: "raftstore/mvcc/view.go",
		old:     "	if after < v.history.compacted {\n		return nil, fmt.Errorf(\"history after",
		new:     "	if after < v.history.compacted {\n		after = v.history.compacted\n	}\n	if after < v.history.compacted {\n		return nil, fmt.Errorf(\"history after",
		finder:  "./raftstore/storetest:TestMemoryConforms/Compaction",
		how:     "a watch goes on behind the compacted stretch as if nothing were missing",
		harness: "./raftstore/storetest/linear:TestGoodStorePassesInUnrest",
	},
	{
		name: "compaction swallows its own batch", file: "raftstore/mvcc/machine.go",
		old:    "	m.collectEvents()\n	if upTo > m.revision {",
		new:    "	m.collectedUpTo = max(m.collectedUpTo, min(upTo, m.revision))\n	if upTo > m.revision {",
		finder: "./raftstore/mvcc:TestCompactionInTheSameBatch",
		how:    "events applied together with the compaction never come out",
	},
	{
		name: "lost TTL", file: "raftstore/mvcc/snapshot.go",
		old:    "		if it.Expires != 0 {\n			l.m.deadlines",
		new:    "		if false {\n			l.m.deadlines",
		finder: "./raftstore/mvcc:TestAgreesWithTwin -rapid.nofailfile",
		how:    "keys loaded from a snapshot do not expire any more",
	},
	{
		name: "snapshot without dedup table", file: "raftstore/mvcc/snapshot.go",
		old:    "	for e := s.recent.uses.Front(); e != nil; e = e.Next() {",
		new:    "	for e := s.recent.uses.Front(); e != nil && false; e = e.Next() {",
		finder: "./raftstore/mvcc:TestRetryAppliesOnce",
		how:    "a retry after a snapshot applies a second time",
	},
	{
		name: "forwarded write applied twice", file: "raftstore/replica/forward.go",
		old:     "		items[i] = newItem(p)\n",
		new:     "		p.Id = s.r.ids.next()\n		items[i] = newItem(p)\n",
		finder:  "./raftstore/replica:TestLostReplyAppliesOnce",
		how:     "a write forwarded to two leaders is two writes",
		harness: "./raftstore/replica:TestLinearizable -linear.replicas=3 -linear.for=6s",
		perhaps: true,
	},
	{
		name: "follower serving before replay", file: "raftstore/replica/read.go",
		old:     "			if err := r.fsm.line.wait(ctx, at.index); err != nil {",
		new:     "			if err := ctx.Err(); err != nil {",
		finder:  "./raftstore/replica:TestReadsWaitForReplay",
		how:     "a replica that just started shows the state of its beginning",
		harness: "./raftstore/replica:TestLinearizable -linear.replicas=3 -linear.for=6s",
		perhaps: true,
	},
	{
		name: "revision going back after restore", file: "raftstore/disk/restore.go",
		old:    "	if err := machine.Rebase(RestoreBase(max(machine.View().Revision(), o.Above), o.now())); err != nil {",
		new:    "	if err := machine.Rebase(machine.View().Revision() + 1); err != nil {",
		finder: "./raftstore/replica:TestBackupAndRestore",
		how:    "a restored store hands out revisions of the old one again",
	},
	{
		name: "new leader serving before its barrier", file: "raftstore/replica/lead.go",
		old: "	for l.ctx.Err() == nil {\n		future",
		new: "	_, _ = r.proposeCommand(&storev1.Command{Kind: &storev1.Command_Batch{Batch: &storev1.Batch{}}})\n" +
			"	for l.term = r.raft.CurrentTerm(); l.term == 0; {\n		future",
		finder: "./raftstore/replica:TestNewLeaderReadsWhatTheOldAcknowledged",
		how:    "it does not know yet what the old leader has committed",
	},
	{
		name: "acknowledged after a failed flush", file: "raftstore/disk/journal.go",
		old:    "	_, err := f.WriteAt(b, j.end)\n	if err == nil {\n		err = f.Sync()",
		new:    "	_, err := f.WriteAt(b, j.end)\n	if err == nil {\n		_ = f.Sync()",
		finder: "./raftstore/disk:TestFailedFlushIsNoAppend",
		how:    "an append that did not reach the disk is reported as done",
	},
	{
		name: "torn journal record accepted", file: "raftstore/disk/chain.go",
		old:    "		if kind != sectorGood || piece.run != s.run || piece.number != s.number+uint64(i) {",
		new:    "		if _ = piece; kind == sectorBad {",
		finder: "./raftstore/disk:TestTornRecordIsDropped",
		how:    "half a record is taken for a whole one",
	},
	{
		name: "damage taken for the end of the journal", file: "raftstore/disk/chain.go",
		old:    "		case sectorBad:\n			return c,",
		new:    "		case sectorBad:\n			continue\n			return c,",
		finder: "./raftstore/disk:TestJournalFindsDamage",
		how:    "an acknowledged record that went bad is dropped without a word",
	},
	{
		name: "what was sent counts as taken", file: "raftstore/replica/early.go",
		old: "	if len(req.Entries) == 0 || s.over || s.held < last || s.claimed != req.PrevLogEntry {\n		return false\n	}\n	s.claimed = last\n	*resp = s.answer\n",
		new: "	if len(req.Entries) == 0 || s.sent < last {\n		return false\n	}\n	s.claimed = last\n" +
			"	*resp = raft.AppendEntriesResponse{Term: req.Term, Success: true}\n",
		finder: "./raftstore/replica:TestEarlyAnswersAreTrue",
		how:    "raft is told that a peer holds entries which never reached it",
	},
	{
		name: "commit index beyond the request", file: "raftstore/replica/early.go",
		old:    "	req.LeaderCommitIndex = min(commit, s.sent)\n",
		new:    "	req.LeaderCommitIndex = commit\n",
		finder: "./raftstore/replica:TestEarlyAnswersAreTrue",
		how:    "a peer takes entries of another leader for committed",
	},
}
