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
	welcomeTimeout        = 5 * time.Second  // limit from Hello to Welcome
	stableSessionAge      = 5 * time.Second  // a session that lasted this long resets the retry delay
	avoidFailedReplicaFor = 10 * time.Second // how long the session avoids a replica after a failure
	// also connect to configured addresses after this time without a stable session
	useSeedAfter            = 15 * time.Second
	maxUnansweredHeartbeats = 3
	minHeartbeatInterval    = 50 * time.Millisecond // lower bound of the heartbeat interval
	// how long a restarted agent waits to be ready before it opens a session
	readinessWait = time.Second
)

// runSessions keeps one session open with one of the replicas until ctx ends. When a session
// breaks, it tries the next replica at once. When all replicas have failed, it waits with
// exponential backoff.
func (s *Session) runSessions(ctx context.Context) error {
	if err := s.awaitReadiness(ctx); err != nil {
		return err
	}
	pause := backoff.Backoff{Min: 50 * time.Millisecond, Max: 3 * time.Second, Jitter: 0.5}
	lastGood := time.Now()
	tried := make(map[string]bool)
	for {
		l := s.pickReplica(tried)
		if l == nil {
			// All replicas have been tried, or no replica is known yet.
			clear(tried)
			s.replicas.setUseSeed(time.Since(lastGood) > useSeedAfter)
			if err := s.delayRetry(ctx, pause.Next()); err != nil {
				return err
			}
			continue
		}
		began := time.Now()
		err := s.runSession(ctx, l)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		s.view.discardIncoming()
		if errors.Is(err, errObjectMissing) {
			s.requestFullAssignment()
			continue
		}
		if status.Code(err) == codes.PermissionDenied || s.creds.id.isServerUntrusted() {
			s.creds.enrollAgain(ctx, err)
		}
		s.log.Warn("session ended", "replica", l.address, "after", time.Since(began).Round(time.Millisecond), "err",
			err)
		l.avoidUntil(time.Now().Add(avoidFailedReplicaFor))
		if time.Since(began) > stableSessionAge {
			pause.Reset()
			clear(tried)
			lastGood = time.Now()
		}
		tried[l.address] = true
		// A random delay spreads the nodes of a failed replica over time.
		if err := wait.Delay(ctx, time.Duration(rand.Int64N(int64(50*time.Millisecond)))); err != nil {
			return err
		}
	}
}

// awaitReadiness waits until the node's facts no longer report NotReady, for at most readinessWait.
// A restarted agent would otherwise report NotReady while it recovers its pods, and Services would
// drop their endpoints. It returns at once if there is no checkpoint, as on a new node.
func (s *Session) awaitReadiness(ctx context.Context) error {
	if !s.hasAssignment() {
		return nil
	}
	limit := time.NewTimer(readinessWait)
	defer limit.Stop()
	for s.reports.reporter.reportsNotReady() {
		select {
		case <-s.reports.reporter.factsReplaced:
		case <-limit.C:
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return nil
}

// pickReplica returns the first of the sessionCandidates with an address that is not in tried, or
// nil if all replica connections have been tried.
func (s *Session) pickReplica(tried map[string]bool) *replicaLink {
	for _, l := range s.replicas.sessionCandidates(time.Now()) {
		if !tried[l.address] {
			return l
		}
	}
	return nil
}

// delayRetry waits for the delay before the next attempt to open a session. If no replica
// connection exists, it waits until one is added instead. It returns an error only if ctx ends.
func (s *Session) delayRetry(ctx context.Context, delay time.Duration) error {
	if len(s.replicas.allLinks()) == 0 {
		select {
		case <-s.linksAdded:
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return wait.Delay(ctx, delay)
}

func (s *Session) signalLinks() {
	s.linksAdded.Send()
}

// runSession runs one session over the replica connection l until the session breaks. It returns
// the error that broke the session.
func (s *Session) runSession(ctx context.Context, l *replicaLink) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	stream, err := fleetv1.NewFleetClient(l.conn).Session(ctx)
	if err != nil {
		return fmt.Errorf("open session: %w", err)
	}
	hello, err := s.helloMessage()
	if err != nil {
		return err
	}
	if err := stream.Send(&fleetv1.AgentMessage{Kind: &fleetv1.AgentMessage_Hello{Hello: hello}}); err != nil {
		_, rerr := stream.Recv() // returns the reason
		return fmt.Errorf("send Hello: %w", errors.Join(err, rerr))
	}
	slow := time.AfterFunc(welcomeTimeout, func() { cancel(fmt.Errorf("no Welcome within %s", welcomeTimeout)) })
	first, err := stream.Recv()
	slow.Stop()
	if err != nil {
		return fmt.Errorf("wait for Welcome: %w", errors.Join(err, ignoreCanceled(context.Cause(ctx))))
	}
	w := first.GetWelcome()
	if w == nil {
		return fmt.Errorf("replica at %s did not send Welcome first", l.address)
	}
	s.log.Info("session opened", "replica", w.Replica, "address", l.address, "epoch", w.Epoch)
	s.view.setCluster(clusterFromWelcome(w))
	s.connection.setConnected(true, time.Now())
	defer func() { s.connection.setConnected(false, time.Now()) }()
	c := &sessionStream{
		session: s, stream: stream, epoch: w.Epoch,
		heartbeatInterval: max(time.Duration(w.HeartbeatMillis)*time.Millisecond, minHeartbeatInterval),
		receivingFull:     true,
		newInterval:       make(chan time.Duration, 1), reportedAuthorities: hello.Authorities,
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
		err := c.receiveLoop()
		heard <- err
		cancel(err)
	})
	err = c.sendLoop(ctx)
	switch {
	case errors.Is(err, io.EOF): // the stream has ended; the receiver has the reason
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

func (s *Session) helloMessage() (*fleetv1.Hello, error) {
	s.tokens.resetRequests()
	facts := s.reports.reporter.resetForSession()
	h := &fleetv1.Hello{NodeName: s.cfg.NodeName, AgentVersion: s.cfg.Version, BootId: s.cfg.BootID}
	forget := s.needFullAssignment.Swap(false)
	if s.hasAssignment() && !forget {
		h.ResumeRevision = s.Revision()
	}
	h.PeersDigest = s.view.peersDigest().encodeDigest()
	h.Authorities = s.creds.authoritiesReport()
	if facts != nil {
		raw, err := encodeObject("Node", facts)
		if err != nil {
			return nil, err
		}
		h.Facts = &fleetv1.NodeFacts{Node: raw}
	}
	return h, nil
}

// requestFullAssignment makes the next session deliver every object again, not only changes.
func (s *Session) requestFullAssignment() {
	s.needFullAssignment.Store(true)
}

// sessionStream is an open session with a replica. sendLoop is its only sender, receiveLoop its
// only receiver.
type sessionStream struct {
	session           *Session
	stream            fleetv1.Fleet_SessionClient
	epoch             uint64
	heartbeatInterval time.Duration
	receivingFull     bool // the full assignment is not complete; used by receiveLoop only

	newInterval         chan time.Duration   // capacity 1: the latest heartbeat interval from the control plane
	reportedAuthorities *fleetv1.Authorities // authorities that were sent last; used by sendLoop only
	trustReceived       atomic.Bool          // the replica has sent a Trust message, so it accepts Authorities

	mu         sync.Mutex
	unanswered int // heartbeats sent since the last acknowledgment
}

// sendLoop sends heartbeats and pending reports until ctx ends, sending fails, or
// maxUnansweredHeartbeats heartbeats are unacknowledged.
func (c *sessionStream) sendLoop(ctx context.Context) error {
	beat := time.NewTicker(c.heartbeatInterval)
	defer beat.Stop()
	if err := c.sendHeartbeat(); err != nil {
		return err
	}
	for {
		if err := c.sendPending(); err != nil {
			return err
		}
		select {
		case <-c.session.reports.reporter.wake:
		case <-beat.C:
			if err := c.sendHeartbeat(); err != nil {
				return err
			}
		case c.heartbeatInterval = <-c.newInterval:
			beat.Reset(c.heartbeatInterval)
		case <-ctx.Done():
			return nil
		}
	}
}

func (c *sessionStream) sendHeartbeat() error {
	c.mu.Lock()
	missed := c.unanswered
	c.unanswered++
	c.mu.Unlock()
	if missed >= maxUnansweredHeartbeats {
		return fmt.Errorf("%d heartbeats were not acknowledged", missed)
	}
	rev, _ := c.session.reports.proxy.currentRevision()
	return c.sendWithEpoch(&fleetv1.AgentMessage{Kind: &fleetv1.AgentMessage_Heartbeat{Heartbeat: &fleetv1.Heartbeat{
		SentUnixNano: time.Now().UnixNano(), ProxyRevision: rev}}})
}

// setHeartbeatInterval sets the interval at which sendLoop sends heartbeats, as the control plane
// has requested. The minimum is minHeartbeatInterval.
func (c *sessionStream) setHeartbeatInterval(interval time.Duration) {
	select {
	case <-c.newInterval: // replaces an interval that sendLoop has not received yet
	default:
	}
	// does not block: receiveLoop is the only sender on the channel
	c.newInterval <- max(interval, minHeartbeatInterval)
}

func (c *sessionStream) sendWithEpoch(m *fleetv1.AgentMessage) error {
	m.Epoch = c.epoch
	if err := c.stream.Send(m); err != nil {
		return fmt.Errorf("send: %w", err)
	}
	return nil
}

func (c *sessionStream) sendPending() error {
	msgs, errs := c.session.reports.reporter.pendingMessages()
	for _, err := range errs {
		c.session.log.Error("report dropped", "err", err)
	}
	if now := c.session.creds.authoritiesReport(); c.trustReceived.Load() && !proto.Equal(now, c.reportedAuthorities) {
		c.reportedAuthorities = now
		msgs = append(msgs, &fleetv1.AgentMessage{Kind: &fleetv1.AgentMessage_Authorities{Authorities: now}})
	}
	for _, m := range append(msgs, c.session.tokens.unsentRequests()...) {
		if err := c.sendWithEpoch(m); err != nil {
			return err
		}
	}
	return nil
}

// receiveLoop receives and handles the messages of the control plane in a session until the stream
// breaks.
func (c *sessionStream) receiveLoop() error {
	paced := c.heartbeatInterval
	for {
		m, err := c.stream.Recv()
		if err != nil {
			return err
		}
		s := c.session
		switch k := m.Kind.(type) {
		case *fleetv1.ControlMessage_Objects:
			if err := s.view.applyObjects(k.Objects); err != nil {
				if !errors.Is(err, errObjectMissing) {
					s.requestFullAssignment()
				}
				return err
			}
		case *fleetv1.ControlMessage_Synced:
			s.view.completeBatch(k.Synced.Revision, c.receivingFull)
			s.view.markConfirmed()
			c.receivingFull = false
		case *fleetv1.ControlMessage_HeartbeatAck:
			c.mu.Lock()
			c.unanswered = 0
			c.mu.Unlock()
			s.lastAck.recordAck(time.Since(time.Unix(0, k.HeartbeatAck.SentUnixNano)))
			if every := time.Duration(k.HeartbeatAck.HeartbeatMillis) * time.Millisecond; every > 0 && every != paced {
				paced = every
				c.setHeartbeatInterval(every)
			}
		case *fleetv1.ControlMessage_Token:
			s.tokens.handleToken(k.Token)
		case *fleetv1.ControlMessage_StopGate:
			g := s.reports.gates.gateFor(types.UID(k.StopGate.Uid))
			g.once.Do(func() { close(g.open) })
		case *fleetv1.ControlMessage_Trust:
			if err := s.creds.applyTrust(k.Trust); err != nil {
				return err
			}
			c.trustReceived.Store(true)
			s.reports.reporter.wakeSender()
		case *fleetv1.ControlMessage_StatusAck:
			s.reports.reporter.handleStatusAck(types.UID(k.StatusAck.Uid))
		}
	}
}
