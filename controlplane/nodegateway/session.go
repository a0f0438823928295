package nodegateway

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/netip"
	"strings"
	"sync"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/podaddress"
	"keelson.dev/keelson/controlplane/client"
	fleetv1 "keelson.dev/keelson/proto/fleet/v1"
)

// session is the session of one agent with this replica.
//
// Goroutines: the gRPC handler waits for the end. receive reads messages and acknowledges
// heartbeats. send drains dirty and outbox. work performs API writes. All end with the session's
// context.
type session struct {
	srv   *Server
	log   *slog.Logger
	node  string
	cert  *x509.Certificate // the client certificate of the node
	epoch uint64
	api   *client.Client // acts as the node
	work  *work
	end   context.CancelCauseFunc
	clock offset
	wake  chan struct{}
	begun func() // frees the slot in turns after the first full assignment

	silence time.Duration // timeout after which the silent session was ended; 0 = ended otherwise
	doubted bool          // the node is suspected (unheard.go); used by the handler's goroutine only

	down   sync.Mutex // held during stream.Send; no other lock is taken while it is held
	stream fleetv1.Fleet_SessionServer

	mu     sync.Mutex
	dirty  map[key]struct{}
	outbox []*fleetv1.ControlMessage
	facts  *v1.Node
	// authorities are the trusted CAs that the agent reported last; nil = not reported.
	authorities *fleetv1.Authorities
	echoes      map[types.UID]echo
	said        map[types.UID]v1.ConditionStatus // last reported readiness by pod
	heard       time.Time                        // time of the last message from the agent; monotonic
	tokens      int                              // pending token requests
}

// echo records that this session changed a pod from one revision to another.
type echo struct {
	from, to uint64
	stored   *v1.Pod // the pod at revision to
}

// maxOutbox bounds the messages queued for an agent that does not read.
const maxOutbox = 4096

var errSlowAgent = status.Error(codes.ResourceExhausted, "fleet: the agent does not read what it asked for")

// Session implements fleetv1.FleetServer: it runs the node's session, which sends the node's
// objects and receives its reports.
func (s *Server) Session(stream fleetv1.Fleet_SessionServer) error {
	node, err := nodeOf(stream.Context())
	if err != nil {
		return err
	}
	first, err := first(s, stream)
	if err != nil {
		return err
	}
	hello := first.GetHello()
	if hello == nil || hello.NodeName != node {
		return status.Errorf(codes.InvalidArgument, "fleet: session of node %s: the first message must be its Hello", node)
	}
	if err := s.ready(stream.Context()); err != nil {
		return err
	}
	if s.revoked(node, certificateOf(stream.Context())) { // the connection may be older than the revocation records in the informer
		return errRevoked(node)
	}
	ctx, end := context.WithCancelCause(podaddress.WithSource(stream.Context(), reportSource(stream.Context())))
	defer end(nil)
	sess := &session{
		srv: s, node: node, cert: certificateOf(stream.Context()), log: s.cfg.Log.With("node", node),
		api:  s.cfg.Client.As(api.NodeUser(node)),
		work: newWork(ctx, 16), end: end,
		wake: make(chan struct{}, 1), dirty: make(map[key]struct{}), echoes: make(map[types.UID]echo),
		said: make(map[types.UID]v1.ConditionStatus), heard: time.Now(),
	}
	grumble := &complaints{log: sess.log}
	sess.work.fails = func(key string, tries int, err error) { grumble.note(key, tries, err, time.Now()) }
	defer sess.work.wait()
	defer end(nil)
	begun, err := s.joins.take(ctx, joinPatience)
	if err != nil {
		return err
	}
	defer begun()
	sess.begun = begun
	// Decoded only with a slot: thousands of agents may request one repeatedly.
	if err := sess.setFacts(hello.Facts); err != nil {
		return status.Errorf(codes.InvalidArgument, "fleet: session of node %s: %v", node, err)
	}
	if err := sess.setAuthorities(hello.Authorities); err != nil {
		return status.Errorf(codes.InvalidArgument, "fleet: session of node %s: %v", node, err)
	}
	if sess.epoch, err = s.joinRecord(ctx, node); err != nil {
		return status.Errorf(codes.Unavailable, "fleet: session of node %s: %v", node, err)
	}
	older, ok := s.view.join(sess)
	if !ok {
		return errSuperseded(node)
	}
	if older != nil {
		older.end(errSuperseded(node))
	}
	s.losses.disarm(node)
	s.doubts.disarm(node)
	defer s.leave(sess)
	sess.log.Info("node joined", "epoch", sess.epoch, "replica", s.cfg.Replica)
	return sess.run(ctx, stream, resumption{hello.ResumeRevision, digestOf(hello.PeersDigest)})
}

// reportSource returns the remote and local address of the node's connection.
func reportSource(ctx context.Context) podaddress.Source {
	var local netip.AddrPort
	if p, ok := peer.FromContext(ctx); ok && p.LocalAddr != nil {
		local, _ = netip.ParseAddrPort(p.LocalAddr.String()) // on error the address is zero, that is, unknown
	}
	return podaddress.SourceOf(addressOf(ctx), local.Addr())
}

func errSuperseded(node string) error {
	return status.Errorf(codes.Aborted, "fleet: a newer session of node %s exists", node)
}

// leave unregisters an ended session. It starts the grace timers, unless the node has a newer
// session on this replica.
func (s *Server) leave(sess *session) {
	if s.view.leave(sess) {
		if !s.standbys.has(sess.node) {
			s.gate.silent(sess.node)
		}
		sess.log.Info("session ended", "epoch", sess.epoch)
		s.losses.arm(sess.node, sess.epoch, s.graceAfter(sess.silence))
		s.doubts.arm(sess.node, sess.epoch, s.doubtAfter()) // an agent that restarts in time keeps its load balancer addresses
	}
}

func (x *session) run(ctx context.Context, stream fleetv1.Fleet_SessionServer, has resumption) error {
	x.stream = stream
	if err := x.tell(&fleetv1.ControlMessage{Kind: &fleetv1.ControlMessage_Welcome{Welcome: x.welcome()}}); err != nil {
		return err
	}
	if m := x.trust(); m != nil { // later changes are sent by keepTrust
		if err := x.tell(m); err != nil {
			return err
		}
	}
	x.syncNode()
	// Goroutines of the server, not of this handler: a blocked Send returns only after the handler
	// has returned.
	x.srv.children.Go(func() { x.end(x.receive(stream)) })
	x.srv.children.Go(func() { x.end(x.send(ctx, has)) })
	_, suspect := x.srv.pace()
	silence, listen := time.NewTimer(suspect), time.NewTimer(x.srv.doubtAfter())
	defer silence.Stop()
	defer listen.Stop()
	for {
		select {
		case <-ctx.Done():
			return sessionError(context.Cause(ctx))
		case <-x.srv.stopping:
			return status.Errorf(codes.Unavailable, "fleet: replica %s is stopping", x.srv.cfg.Replica)
		case <-listen.C:
			listen.Reset(x.listen(x.quiet()))
		case <-silence.C:
			quiet := x.quiet()
			if _, suspect = x.srv.pace(); quiet >= suspect {
				x.silence = suspect
				return status.Errorf(codes.Unavailable, "fleet: node %s has been silent for %s", x.node, quiet.Round(time.Millisecond))
			}
			silence.Reset(suspect - quiet)
		}
	}
}

// quiet returns the time since the agent's last message.
func (x *session) quiet() time.Duration {
	x.mu.Lock()
	defer x.mu.Unlock()
	return time.Since(x.heard)
}

// sessionError returns the status error for the end of a session: nil for a regular end, Internal
// for errors without a gRPC code.
func sessionError(err error) error {
	if err == nil || errors.Is(err, context.Canceled) || errors.Is(err, io.EOF) {
		return nil
	}
	if _, ok := status.FromError(err); ok {
		return err
	}
	return status.Error(codes.Internal, err.Error())
}

func (x *session) welcome() *fleetv1.Welcome {
	c := x.srv.cfg
	every, _ := x.srv.pace()
	pods, services := families(c.Cluster.ClusterCIDR), families(c.Cluster.ServiceCIDR)
	w := &fleetv1.Welcome{
		Epoch: x.epoch, ClusterName: c.Cluster.Name, ClusterDomain: c.Cluster.Domain,
		ClusterCidr: pods[0], ClusterCidrs: pods, ServiceCidr: services[0], ServiceCidrs: services,
		HeartbeatMillis: every.Milliseconds(), Replica: c.Replica,
	}
	if n, ok := x.srv.view.nodeObject(x.node); ok {
		w.PodCidr, w.PodCidrs = n.Spec.PodCIDR, n.Spec.PodCIDRs
	}
	return w
}

// families splits a comma-separated list of prefixes.
func families(list string) []string {
	out := strings.Split(list, ",")
	for i := range out {
		out[i] = strings.TrimSpace(out[i])
	}
	return out
}

// mark records that the object may have changed. It never blocks.
func (x *session) mark(k key) {
	x.mu.Lock()
	x.dirty[k] = struct{}{}
	x.mu.Unlock()
	x.poke()
}

// post queues a message to the agent. If too many are queued, the session ends.
func (x *session) post(m *fleetv1.ControlMessage) {
	x.mu.Lock()
	x.outbox = append(x.outbox, m)
	tooMany := len(x.outbox) > maxOutbox
	x.mu.Unlock()
	if tooMany {
		x.end(errSlowAgent)
	}
	x.poke()
}

func (x *session) poke() {
	select {
	case x.wake <- struct{}{}:
	default:
	}
}

// tell sends one message. It blocks while the agent does not read.
func (x *session) tell(m *fleetv1.ControlMessage) error {
	x.down.Lock()
	defer x.down.Unlock()
	return x.stream.Send(m)
}

// send sends the full assignment, then every change, until ctx ends.
func (x *session) send(ctx context.Context, has resumption) error {
	v := x.srv.view
	a := newAssignment(x.node, source{v, x}, has)
	defer a.release()
	a.echo = x.isEcho
	var synced uint64
	full := true
	for {
		rev := v.routed.Load() // read before the keys: the promised revision must not include later marks
		keys := x.takeDirty()
		if full {
			keys = a.swapRefs(nil, everywhere, v.keysOf(x.node))
		}
		c, err := a.step(keys)
		if errors.Is(err, errBehind) {
			return errBehind
		}
		if err != nil {
			return fmt.Errorf("fleet: assignment of node %s: %w", x.node, err)
		}
		x.uphold(keys)
		parts := c.parts(full)
		for _, set := range parts {
			if err := x.tell(&fleetv1.ControlMessage{Kind: &fleetv1.ControlMessage_Objects{Objects: set}}); err != nil {
				return err
			}
		}
		if full || len(parts) > 0 || rev > synced {
			if err := x.tell(&fleetv1.ControlMessage{Kind: &fleetv1.ControlMessage_Synced{Synced: &fleetv1.Synced{Revision: rev}}}); err != nil {
				return err
			}
			synced = rev
		}
		if full {
			x.begun()
		}
		full = false
		for _, uid := range c.stopping {
			v.gate.ask(uid, func() { x.openGate(uid) })
		}
		for _, m := range x.takeOutbox() {
			if err := x.tell(m); err != nil {
				return err
			}
		}
		select {
		case <-x.wake:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// openGate sends the permission to stop the pod. The gate calls it with the gate's lock held.
func (x *session) openGate(uid types.UID) {
	x.post(&fleetv1.ControlMessage{Kind: &fleetv1.ControlMessage_StopGate{StopGate: &fleetv1.StopGate{Uid: string(uid)}}})
}

func (x *session) takeDirty() []key {
	x.mu.Lock()
	defer x.mu.Unlock()
	keys := make([]key, 0, len(x.dirty))
	for k := range x.dirty {
		keys = append(keys, k)
	}
	clear(x.dirty)
	return keys
}

func (x *session) takeOutbox() []*fleetv1.ControlMessage {
	x.mu.Lock()
	defer x.mu.Unlock()
	out := x.outbox
	x.outbox = nil
	return out
}

// wrote records that this session changed a pod's status from revision from to that of stored.
func (x *session) wrote(from uint64, stored *v1.Pod) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if e, ok := x.echoes[stored.UID]; ok && e.to == from {
		from = e.from // two writes between two updates count as one
	}
	x.echoes[stored.UID] = echo{from, revisionOf(stored), stored}
}

// newest returns the newest known version of a pod: from the informer, or from this session's last
// write if the informer lags behind.
func (x *session) newest(namespace, name string, uid types.UID) (*v1.Pod, bool) {
	p, ok := x.srv.view.pod(namespace, name)
	x.mu.Lock()
	defer x.mu.Unlock()
	if e, wrote := x.echoes[uid]; wrote && ok && p.UID == uid && e.to > revisionOf(p) {
		return e.stored, true
	}
	return p, ok
}

// isEcho reports whether this session made the change between the two revisions. It forgets an
// outdated record.
func (x *session) isEcho(uid types.UID, from, to uint64) bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	e, ok := x.echoes[uid]
	if ok && to >= e.to {
		delete(x.echoes, uid)
	}
	return ok && e.from == from && e.to == to
}
