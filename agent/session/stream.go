package session

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/internal/backoff"
	"keelson.dev/keelson/internal/wait"
	fleetv1 "keelson.dev/keelson/proto/fleet/v1"
)

const (
	welcomePatience = 5 * time.Second  // from Hello to Welcome
	stableAfter     = 5 * time.Second  // a session that lived so long was a good one
	shunFor         = 10 * time.Second // how long to avoid a replica that failed us
	widenAfter      = 15 * time.Second // how long to try the learnt replicas alone
	missedBeats     = 3
	leastBeat       = 50 * time.Millisecond // between heartbeats
	settleLimit     = time.Second           // how long an agent that comes back may be silent about itself
)

// sessions keeps one session with one of the replicas until ctx ends. A session that breaks moves
// at once; when all replicas refuse, the pauses grow.
func (s *Session) sessions(ctx context.Context) error {
	if err := s.settle(ctx); err != nil {
		return err
	}
	pause := backoff.Backoff{Min: 50 * time.Millisecond, Max: 3 * time.Second, Jitter: 0.5}
	lastGood := time.Now()
	tried := make(map[string]bool)
	for {
		l := s.pick(tried)
		if l == nil {
			// Everyone has been asked, or nobody is known yet.
			clear(tried)
			s.replicas.widen(time.Since(lastGood) > widenAfter)
			if err := s.pauseOrLink(ctx, pause.Next()); err != nil {
				return err
			}
			continue
		}
		began := time.Now()
		err := s.sessionWith(ctx, l)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		s.view.discard()
		if errors.Is(err, errNotHeld) {
			s.forgetRevision()
			continue
		}
		if status.Code(err) == codes.PermissionDenied || s.id.metStranger() {
			s.enrollAnew(ctx, err)
		}
		s.log.Warn("session ended", "replica", l.address, "after", time.Since(began).Round(time.Millisecond), "err", err)
		l.shun(time.Now().Add(shunFor))
		if time.Since(began) > stableAfter {
			pause.Reset()
			clear(tried)
			lastGood = time.Now()
		}
		tried[l.address] = true
		// The nodes of a dead replica do not arrive at the next one in the same instant.
		if err := wait.Delay(ctx, time.Duration(rand.Int64N(int64(50*time.Millisecond)))); err != nil {
			return err
		}
	}
}

// settle keeps an agent that comes back (it has a checkpoint) from saying NotReady for the moment in which it finds its
// pods again: that word would take them out of every Service. A node that is new speaks at once.
func (s *Session) settle(ctx context.Context) error {
	if !s.known() {
		return nil
	}
	limit := time.NewTimer(settleLimit)
	defer limit.Stop()
	for s.reporter.unready() {
		select {
		case <-s.reporter.told:
		case <-limit.C:
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return nil
}

// pick returns the best replica that has not been tried; nil when all were.
func (s *Session) pick(tried map[string]bool) *link {
	for _, l := range s.replicas.candidates(time.Now()) {
		if !tried[l.address] {
			return l
		}
	}
	return nil
}

// pauseOrLink waits for the delay, or less when links appear.
func (s *Session) pauseOrLink(ctx context.Context, d time.Duration) error {
	if len(s.replicas.links()) == 0 {
		select {
		case <-s.linked:
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return wait.Delay(ctx, d)
}

func (s *Session) linksChanged() {
	select {
	case s.linked <- struct{}{}:
	default:
	}
}

// sessionWith runs one session over the link until it breaks.
func (s *Session) sessionWith(ctx context.Context, l *link) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	stream, err := fleetv1.NewFleetClient(l.conn).Session(ctx)
	if err != nil {
		return fmt.Errorf("open session: %w", err)
	}
	hello, err := s.hello()
	if err != nil {
		return err
	}
	if err := stream.Send(&fleetv1.AgentMessage{Kind: &fleetv1.AgentMessage_Hello{Hello: hello}}); err != nil {
		_, rerr := stream.Recv() // says why
		return fmt.Errorf("say hello: %w", errors.Join(err, rerr))
	}
	slow := time.AfterFunc(welcomePatience, func() { cancel(fmt.Errorf("no welcome within %s", welcomePatience)) })
	first, err := stream.Recv()
	slow.Stop()
	if err != nil {
		return fmt.Errorf("wait for welcome: %w", errors.Join(err, ignoreCanceled(context.Cause(ctx))))
	}
	w := first.GetWelcome()
	if w == nil {
		return fmt.Errorf("replica at %s did not begin with a welcome", l.address)
	}
	s.log.Info("session opened", "replica", w.Replica, "address", l.address, "epoch", w.Epoch)
	s.view.setCluster(clusterOf(w))
	s.online.set(true, time.Now())
	defer func() { s.online.set(false, time.Now()) }()
	c := &conversation{
		s: s, stream: stream, epoch: w.Epoch,
		beat: max(time.Duration(w.HeartbeatMillis)*time.Millisecond, leastBeat), full: true,
		paced: make(chan time.Duration, 1), said: hello.Authorities,
	}
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel(nil)
	md, err := stream.Header()
	if err != nil {
		return err
	}
	wg.Go(func() {
		if err := s.cluster.awaitLaterIdentity(ctx, md, l.address); err != nil {
			cancel(err)
		}
	})
	heard := make(chan error, 1)
	wg.Go(func() {
		err := c.hear()
		heard <- err
		cancel(err)
	})
	err = c.speak(ctx)
	switch {
	case errors.Is(err, io.EOF): // the stream is over; only the receiving half knows why
		return <-heard
	case err != nil:
		return err
	}
	return context.Cause(ctx)
}

func ignoreCanceled(err error) error {
	if errors.Is(err, context.Canceled) {
		return nil
	}
	return err
}

func (s *Session) hello() (*fleetv1.Hello, error) {
	s.tokens.begin()
	facts := s.reporter.begin()
	h := &fleetv1.Hello{NodeName: s.cfg.NodeName, AgentVersion: s.cfg.Version, BootId: s.cfg.BootID}
	s.mu.Lock()
	forget := s.forget
	s.forget = false
	s.mu.Unlock()
	if s.known() && !forget {
		h.ResumeRevision = s.Revision()
	}
	h.PeersDigest = s.view.peersDigest().bytes()
	h.Authorities = s.authorities()
	if facts != nil {
		raw, err := encode("Node", facts)
		if err != nil {
			return nil, err
		}
		h.Facts = &fleetv1.NodeFacts{Node: raw}
	}
	return h, nil
}

// forgetRevision makes the next session deliver everything.
func (s *Session) forgetRevision() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.forget = true
}

// conversation is one session's two halves: speak owns sending, hear owns receiving.
type conversation struct {
	s      *Session
	stream fleetv1.Fleet_SessionClient
	epoch  uint64
	beat   time.Duration
	full   bool // the full assignment is not complete yet; hear's alone

	paced chan time.Duration   // what the control plane says of the beat: the newest
	said  *fleetv1.Authorities // what was said of the authorities; speak's alone
	told  atomic.Bool          // the replica knows of authorities

	mu       sync.Mutex
	unanswer int // heartbeats since the last answer
}

// speak sends heartbeats and whatever is due until ctx ends or three heartbeats went unanswered.
func (c *conversation) speak(ctx context.Context) error {
	beat := time.NewTicker(c.beat)
	defer beat.Stop()
	if err := c.heartbeat(); err != nil {
		return err
	}
	for {
		if err := c.sendDue(); err != nil {
			return err
		}
		select {
		case <-c.s.reporter.wake:
		case <-beat.C:
			if err := c.heartbeat(); err != nil {
				return err
			}
		case c.beat = <-c.paced:
			beat.Reset(c.beat)
		case <-ctx.Done():
			return nil
		}
	}
}

func (c *conversation) heartbeat() error {
	c.mu.Lock()
	missed := c.unanswer
	c.unanswer++
	c.mu.Unlock()
	if missed >= missedBeats {
		return fmt.Errorf("%d heartbeats went unanswered", missed)
	}
	rev, _ := c.s.proxy.get()
	return c.send(&fleetv1.AgentMessage{Kind: &fleetv1.AgentMessage_Heartbeat{Heartbeat: &fleetv1.Heartbeat{
		SentUnixNano: time.Now().UnixNano(), ProxyRevision: rev}}})
}

// pace changes how often the node says that it lives.
func (c *conversation) pace(every time.Duration) {
	select {
	case <-c.paced: // one that speak has not seen yet
	default:
	}
	c.paced <- max(every, leastBeat) // hear is the only one that sends
}

func (c *conversation) send(m *fleetv1.AgentMessage) error {
	m.Epoch = c.epoch
	if err := c.stream.Send(m); err != nil {
		return fmt.Errorf("send: %w", err)
	}
	return nil
}

func (c *conversation) sendDue() error {
	msgs, errs := c.s.reporter.next()
	for _, err := range errs {
		c.s.log.Error("report dropped", "err", err)
	}
	if now := c.s.authorities(); c.told.Load() && !proto.Equal(now, c.said) {
		c.said = now
		msgs = append(msgs, &fleetv1.AgentMessage{Kind: &fleetv1.AgentMessage_Authorities{Authorities: now}})
	}
	for _, m := range append(msgs, c.s.tokens.next()...) {
		if err := c.send(m); err != nil {
			return err
		}
	}
	return nil
}

// hear takes what the control plane says until the stream breaks.
func (c *conversation) hear() error {
	paced := c.beat
	for {
		m, err := c.stream.Recv()
		if err != nil {
			return err
		}
		s := c.s
		switch k := m.Kind.(type) {
		case *fleetv1.ControlMessage_Objects:
			if err := s.view.apply(k.Objects); err != nil {
				if !errors.Is(err, errNotHeld) {
					s.forgetRevision()
				}
				return err
			}
		case *fleetv1.ControlMessage_Synced:
			s.view.complete(k.Synced.Revision, c.full)
			s.view.confirm()
			c.full = false
		case *fleetv1.ControlMessage_HeartbeatAck:
			c.mu.Lock()
			c.unanswer = 0
			c.mu.Unlock()
			s.heard.answered(time.Since(time.Unix(0, k.HeartbeatAck.SentUnixNano)))
			if every := time.Duration(k.HeartbeatAck.HeartbeatMillis) * time.Millisecond; every > 0 && every != paced {
				paced = every
				c.pace(every)
			}
		case *fleetv1.ControlMessage_Token:
			s.tokens.answered(k.Token)
		case *fleetv1.ControlMessage_StopGate:
			g := s.gates.of(types.UID(k.StopGate.Uid))
			g.once.Do(func() { close(g.open) })
		case *fleetv1.ControlMessage_Trust:
			if err := s.believe(k.Trust); err != nil {
				return err
			}
			c.told.Store(true)
			s.reporter.poke()
		case *fleetv1.ControlMessage_StatusAck:
			s.reporter.acknowledged(types.UID(k.StatusAck.Uid))
		}
	}
}
