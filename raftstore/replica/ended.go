package replica

import (
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/hashicorp/raft"

	storev1 "keelson.dev/keelson/proto/store/v1"
)

// A machine that vanishes is missed after HeartbeatTimeout, and nothing tells it from one that is slow. A process that ends is
// known at once: its kernel closes all its connections and refuses new ones. A follower that loses its connection to the leader
// looks whether both are so, and asks the other voters to look for themselves. Whoever a majority of all voters gives its word, which
// they do to one at a time whose log is not worse than theirs, stands for election without waiting.
//
// This is raft's pre-vote, asked by other means: raft's own is granted by those only who have not heard from the leader for a
// timeout. Nothing that is safe in raft depends on the answer. A wrong one costs a live leader its place, once:
//
//   - The leader's listener is closed or refuses, and it lives: its own connections to its followers stay open, by which it
//     tells them of itself. Whoever has one does not take it for ended.
//   - A firewall refuses for the leader, in one direction or for one follower: the others have their connections. For a majority
//     and in both directions, with all connections reset: then no leader can lead.
//   - Another process has the port: it does not refuse. Nor does the leader's own, begun again: it votes with the others as usual.
//   - The machine does not answer, or a router says that it cannot be reached: that is no refusal.
//   - The leader ends by itself: it has handed over before. If it could not, it has ended all the same.
const (
	// endedDial bounds one dial, endedWithin all that one look takes: a process that is being taken apart still accepts for
	// a moment, and what it has closed is heard of one after the other.
	endedDial   = 50 * time.Millisecond
	endedWithin = 100 * time.Millisecond
	endedRetry  = 5 * time.Millisecond
	// accepts is how many dials may be accepted before the port is believed to be served.
	accepts = 5
	// endedAsk is how long the others have to look.
	endedAsk = 2 * endedWithin
	// endedTurn is for how long a voter keeps its word to a replica that still asks others, and the delay of a replica for each
	// voter with a better log.
	endedTurn = 50 * time.Millisecond
	// lookers bounds how many others this replica looks for at once.
	lookers = 4
)

// watchProcess stands for election when the process of the leader has ended.
func (r *Replica) watchProcess(ctx context.Context) error {
	for ctx.Err() == nil {
		id, address, moved := r.role.current()
		if id == "" || id == r.cfg.Name {
			select {
			case <-moved:
			case <-ctx.Done():
			}
			continue
		}
		during, end := until(ctx, moved)
		if r.peers.broken(during, address) == nil && votes(r.voters(), r.cfg.Name) && r.ended(during, id, address) {
			r.standFor(during, id)
		}
		select { // a leader that is followed again, or whom the watchdog will miss, is not looked after all the time
		case <-during.Done():
		case <-time.After(r.cfg.HeartbeatTimeout / 4):
		}
		end()
	}
	return nil
}

// seesEnded looks, for another voter, whether the process of this replica's leader has ended, and gives it its word where
// its log is not worse than this one's. Who has no vote is refused at once: nobody would elect it, and the word would be
// kept from those who can be. A voter that stands has looked a moment ago and a majority with it: its word is confirmed
// without another look, for as long as an election may take.
func (r *Replica) seesEnded(ctx context.Context, leader string, asking standing, stands bool) bool {
	id, address, _ := r.role.current()
	if id != leader || id == r.cfg.Name {
		return false // it follows another, or none: then it has voted, or will
	}
	if !votes(r.voters(), asking.id) {
		return false
	}
	if stands {
		return !asking.less(r.ownStanding()) && r.word.keep(leader, asking.id, r.electionTurn())
	}
	select {
	case r.looking <- struct{}{}:
		defer func() { <-r.looking }()
	default:
		return false
	}
	if !r.ended(ctx, id, address) {
		return false
	}
	return !asking.less(r.ownStanding()) && r.word.keep(leader, asking.id, endedTurn)
}

// ownStanding returns the name of this replica and the end of its log.
func (r *Replica) ownStanding() standing {
	mine := standing{id: r.cfg.Name}
	mine.index, mine.term = r.lastEntry()
	return mine
}

// electionTurn is for how long a voter keeps its word to a replica that stands for election. A busy machine may take hundreds of
// milliseconds for the votes. If two replicas stood meanwhile, the votes could be split, and the next election would begin after
// an election timeout only.
func (r *Replica) electionTurn() time.Duration { return r.cfg.HeartbeatTimeout / 2 }

// ended reports whether the process at an address refuses connections and has none of its own to this replica any more.
func (r *Replica) ended(ctx context.Context, id, address string) bool {
	ctx, cancel := context.WithTimeout(ctx, endedWithin)
	defer cancel()
	for accepted := 0; accepted < accepts; {
		refused, err := r.refuses(ctx, address)
		if err != nil {
			return false // it does not answer, which says nothing
		}
		if !refused {
			accepted++
		} else if r.port.callers.none(id) {
			return true
		}
		select {
		case <-time.After(endedRetry):
		case <-ctx.Done():
			return false
		}
	}
	return false
}

// refuses dials an address. An error says that nobody answered.
func (r *Replica) refuses(ctx context.Context, address string) (bool, error) {
	ctx, cancel := context.WithTimeout(ctx, endedDial)
	defer cancel()
	conn, err := r.peers.dial(ctx, address)
	if errors.Is(err, syscall.ECONNREFUSED) {
		return true, nil
	}
	if err != nil {
		return false, err
	}
	return false, conn.Close()
}

// standFor makes this replica a candidate in the place of a leader whose process has ended, once a majority sees that too and
// gives it its word. It goes on asking until another leads, or the watchdog of silent leaders may. A replica without a vote
// asks for nobody's word.
func (r *Replica) standFor(ctx context.Context, leader string) {
	heard := r.raft.LastContact()
	for ctx.Err() == nil {
		voters := r.voters()
		if !votes(voters, r.cfg.Name) || r.meters.pendingWrite() > writePatience {
			return // nobody would elect it, or it could not vote for itself
		}
		majority := len(voters)/2 + 1
		agree, better := r.agreeEnded(ctx, leader, voters, majority, false)
		if agree >= majority && majority > 2 && r.word.keep(leader, r.cfg.Name, endedTurn) {
			// Of three voters one has ended, and of the other two only the better one gets a word. Of more voters two can
			// each get a majority if the words given to the first one expire before it is elected.
			agree, better = r.agreeEnded(ctx, leader, voters, majority, true)
		}
		if r.raft.State() != raft.Follower || r.raft.LastContact() != heard || time.Since(heard) > r.cfg.HeartbeatTimeout*3/4 {
			return
		}
		if agree >= majority && r.word.keep(leader, r.cfg.Name, r.electionTurn()) {
			r.stand(leader, agree, len(voters))
			return
		}
		select { // who has a better log comes first
		case <-time.After(time.Duration(better)*endedTurn + time.Duration(rand.Int64N(int64(endedTurn)))):
		case <-ctx.Done():
		}
	}
}

// stand makes this replica a candidate at once, as a leader does that hands over.
func (r *Replica) stand(leader string, agree, voters int) {
	r.log.Info("the leader's process has ended: this replica stands for election", "leader", leader, "agree", agree, "voters", voters)
	notYet := r.roles.intend("the process of leader " + leader + " has ended")
	r.word.stand(leader)
	req := &raft.TimeoutNowRequest{RPCHeader: r.header()}
	var resp raft.TimeoutNowResponse
	if err := r.trans.TimeoutNow(raft.ServerID(r.cfg.Name), raft.ServerAddress(r.address), req, &resp); err != nil {
		notYet()
		r.log.Warn("standing for election at once", "error", err)
	}
}

// agreeEnded asks the other voters whether they see the leader's process ended and would have this replica in its place or,
// where this replica stands, whether they still would. It counts this replica and those who do, and of those who have
// answered the ones with a better log.
func (r *Replica) agreeEnded(ctx context.Context, leader string, voters []raft.Server, majority int, stands bool) (agree, better int) {
	var asking sync.WaitGroup
	defer asking.Wait()
	ctx, cancel := context.WithTimeout(ctx, endedAsk)
	defer cancel()
	mine := r.ownStanding()
	req := &storev1.StateRequest{EndedLeader: leader, From: mine.id, LastIndex: mine.index, LastTerm: mine.term, Stands: stands}
	answers, asked := make(chan saying, len(voters)), 0
	for _, v := range voters {
		if id := string(v.ID); id == r.cfg.Name || id == leader {
			continue
		}
		asked++
		asking.Go(func() { answers <- r.saysEnded(ctx, v, req, mine) })
	}
	return tally(answers, asked, majority)
}

// saying is what another voter says of a leader whose process has ended: that it sees it too and gives its word, and that its
// own log is better. One that does not answer says neither.
type saying struct{ ended, better bool }

// saysEnded asks one voter.
func (r *Replica) saysEnded(ctx context.Context, v raft.Server, req *storev1.StateRequest, mine standing) saying {
	client, err := r.peers.client(string(v.Address))
	if err != nil {
		return saying{}
	}
	s, err := client.State(ctx, req)
	if err != nil || s.GetGroup() != r.group.id() {
		return saying{}
	}
	return saying{ended: s.GetEnded(), better: mine.less(standing{term: s.GetLastTerm(), index: s.GetLastIndex(), id: string(v.ID)})}
}

// tally counts what the others say, and who asks, until a majority agrees or all have answered: a voter whose machine is slow
// or frozen holds up nobody then.
func tally(answers <-chan saying, asked, majority int) (agree, better int) {
	for agree = 1; asked > 0 && agree < majority; asked-- {
		a := <-answers
		if a.ended {
			agree++
		}
		if a.better {
			better++
		}
	}
	return agree, better
}

// votes reports whether a replica is among the voters.
func votes(voters []raft.Server, name string) bool {
	return slices.ContainsFunc(voters, func(v raft.Server) bool { return string(v.ID) == name })
}

// word is whom this replica would have in the place of an ended leader: one for a while, so that no two of them take each
// other's votes.
type word struct {
	mu       sync.Mutex
	leader   string // the ended leader
	to       string
	until    time.Time
	replaces string // the leader in whose place this replica last stood for election
}

// keep gives the word, itself included, for a duration, unless another has it in the place of the same leader. A word that
// lasts longer already is not shortened.
func (w *word) keep(leader, to string, turn time.Duration) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	now := time.Now()
	lasts := w.leader == leader && now.Before(w.until)
	if lasts && w.to != to {
		return false
	}
	if until := now.Add(turn); !lasts || until.After(w.until) {
		w.leader, w.to, w.until = leader, to, until
	}
	return true
}

// stand records that this replica stands for election in the place of a leader.
func (w *word) stand(leader string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.replaces = leader
}

// replaced returns the leader in whose place this replica last stood for election, or "".
func (w *word) replaced() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.replaces
}

// callers counts the connections of raft that other replicas have to this one, by the names in their certificates.
type callers struct {
	mu     sync.Mutex
	byName map[string]int
}

// enter counts a connection; left, which may be called more than once, counts it no more.
func (c *callers) enter(name string) (left func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.byName == nil {
		c.byName = make(map[string]int)
	}
	c.byName[name]++
	return sync.OnceFunc(func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		if c.byName[name]--; c.byName[name] == 0 {
			delete(c.byName, name)
		}
	})
}

func (c *callers) none(name string) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.byName[name] == 0
}
