package session

import (
	"context"
	"crypto/x509"
	"log/slog"
	"net/netip"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/controlplane/api/podaddress"
	"keelson.dev/keelson/controlplane/nodegateway/assign"
	"keelson.dev/keelson/controlplane/nodegateway/report"
	"keelson.dev/keelson/controlplane/nodegateway/wire"
	"keelson.dev/keelson/internal/wakeup"
	fleetv1 "keelson.dev/keelson/proto/fleet/v1"
)

// nodeSession is the session of one agent with this replica. It implements assign.Subscriber and
// report.Session.
//
// Its goroutines are: the gRPC handler, which waits for the end; receiveMessages, which receives
// messages and acknowledges heartbeats; sendChanges, which sends the updates of the feed and the
// queued messages; and the Reporter's workers, which write to the API. All end with the session's
// context.
type nodeSession struct {
	srv      *Server
	log      *slog.Logger
	node     string
	epoch    uint64
	reporter *report.Reporter
	cancel   context.CancelCauseFunc
	out      outbox
	// releaseSlot frees the slot of Server.starting after the first full assignment was sent.
	releaseSlot func()

	silence   time.Duration // the suspect timeout that ended the session; 0 if it ended for another reason
	suspected bool          // the node is suspected (suspicion.go); only the handler's goroutine uses it

	mu          sync.Mutex
	authorities *fleetv1.Authorities // last reported CAs; nil if none were reported
	lastMessage time.Time            // time of the last message from the agent; monotonic clock
}

// outbox contains the messages that wait to be sent to a session's agent, and the stream.
type outbox struct {
	stream fleetv1.Fleet_SessionServer
	sendMu sync.Mutex    // held during stream.Send; no other lock is taken while it is held
	wake   wakeup.Signal // wakes the sending goroutine

	mu       sync.Mutex
	messages []*fleetv1.ControlMessage
}

// ServeSession runs a session of the node until it ends: it sends the node's objects and receives
// its reports. cert is the caller's certificate; hello is the first message of the stream.
func (s *Server) ServeSession(stream fleetv1.Fleet_SessionServer, node string, cert *x509.Certificate,
	hello *fleetv1.Hello) error {
	if err := s.awaitSync(stream.Context()); err != nil {
		return err
	}
	if s.cfg.IsRevoked(node, cert) { // the connection may be older than the revocation record
		return wire.RevokedError(node)
	}
	ctx, cancel := context.WithCancelCause(podaddress.WithSource(stream.Context(), connectionSource(stream.Context())))
	defer cancel(nil)
	n := &nodeSession{
		srv: s, node: node, log: s.cfg.Log.With("node", node), cancel: cancel,
		out: outbox{stream: stream, wake: wakeup.New()}, lastMessage: time.Now(),
	}
	n.reporter = report.NewReporter(ctx, s.cfg.Reports, n, node, cert)
	defer n.reporter.CloseAndWait()
	defer cancel(nil)
	releaseSlot, err := s.starting.acquireSlot(ctx, startTimeout)
	if err != nil {
		return err
	}
	defer releaseSlot()
	n.releaseSlot = releaseSlot
	// The facts are decoded only with a slot: thousands of agents may request one repeatedly.
	if err := n.reporter.SetFacts(hello.Facts); err != nil {
		return status.Errorf(codes.InvalidArgument, "fleet: session of node %s: %v", node, err)
	}
	if err := n.setAuthorities(hello.Authorities); err != nil {
		return status.Errorf(codes.InvalidArgument, "fleet: session of node %s: %v", node, err)
	}
	if n.epoch, err = s.writeSessionRecord(ctx, node); err != nil {
		return status.Errorf(codes.Unavailable, "fleet: session of node %s: %v", node, err)
	}
	older, ok := s.sessions.addSession(n)
	if !ok {
		return supersededError(node)
	}
	if older != nil {
		older.End(supersededError(node))
	}
	feed := s.cfg.View.Subscribe(node, n, assign.NewResumption(hello.ResumeRevision, hello.PeersDigest))
	defer feed.Unsubscribe()
	s.losses.stopTimer(node)
	s.suspicions.stopTimer(node)
	defer s.handleSessionEnd(n)
	n.log.Info("node joined", "epoch", n.epoch, "replica", s.cfg.Lifetime.Replica)
	return n.runSession(ctx, feed)
}

// connectionSource returns the remote and the local address of the node's connection.
func connectionSource(ctx context.Context) podaddress.Source {
	var local netip.AddrPort
	if p, ok := peer.FromContext(ctx); ok && p.LocalAddr != nil {
		local, _ = netip.ParseAddrPort(p.LocalAddr.String()) // after an error, the address is zero, which means unknown
	}
	return podaddress.NewSource(wire.CallerAddress(ctx), local.Addr())
}

func supersededError(node string) error {
	return status.Errorf(codes.Aborted, "fleet: a newer session of node %s exists", node)
}

// handleSessionEnd unregisters an ended session. It starts the timers of the node, unless the node
// has a newer session on this replica.
func (s *Server) handleSessionEnd(n *nodeSession) {
	if s.sessions.removeSession(n) {
		if !s.cfg.HasStandby(n.node) {
			s.cfg.Gate.RecordDisconnect(n.node)
		}
		n.log.Info("session ended", "epoch", n.epoch)
		s.losses.startTimer(n.node, n.epoch, s.graceAfterSilence(n.silence))
		// an agent that restarts before the end of this timer keeps its load balancer addresses
		s.suspicions.startTimer(n.node, n.epoch, s.suspicionTimeout())
	}
}

func (n *nodeSession) runSession(ctx context.Context, feed *assign.Feed) error {
	welcome := &fleetv1.ControlMessage_Welcome{Welcome: n.welcomeMessage()}
	if err := n.sendMessage(&fleetv1.ControlMessage{Kind: welcome}); err != nil {
		return err
	}
	if m := n.trustMessage(); m != nil { // distributeTrust sends later changes
		if err := n.sendMessage(m); err != nil {
			return err
		}
	}
	n.reporter.SyncNode()
	// The server, not this handler, waits for these goroutines: a blocked Send returns only after
	// the handler has returned.
	lifetime := n.srv.cfg.Lifetime
	lifetime.Go(func() { n.End(n.receiveMessages()) })
	lifetime.Go(func() { n.End(n.sendChanges(ctx, feed)) })
	_, suspect := n.srv.currentPace()
	silence, suspicion := time.NewTimer(suspect), time.NewTimer(n.srv.suspicionTimeout())
	defer silence.Stop()
	defer suspicion.Stop()
	for {
		select {
		case <-ctx.Done():
			return wire.StreamError(context.Cause(ctx))
		case <-lifetime.Stopping():
			return lifetime.StoppingError()
		case <-suspicion.C:
			suspicion.Reset(n.updateSuspicion(n.timeSinceMessage()))
		case <-silence.C:
			quiet := n.timeSinceMessage()
			if _, suspect = n.srv.currentPace(); quiet >= suspect {
				n.silence = suspect
				return status.Errorf(codes.Unavailable, "fleet: node %s has been silent for %s", n.node,
					quiet.Round(time.Millisecond))
			}
			silence.Reset(suspect - quiet)
		}
	}
}

// timeSinceMessage returns the time since the agent's last message.
func (n *nodeSession) timeSinceMessage() time.Duration {
	n.mu.Lock()
	defer n.mu.Unlock()
	return time.Since(n.lastMessage)
}

func (n *nodeSession) welcomeMessage() *fleetv1.Welcome {
	c := n.srv.cfg.Cluster
	interval, _ := n.srv.currentPace()
	pods, services := splitPrefixes(c.ClusterCIDR), splitPrefixes(c.ServiceCIDR)
	w := &fleetv1.Welcome{
		Epoch: n.epoch, ClusterName: c.Name, ClusterDomain: c.Domain,
		ClusterCidr: pods[0], ClusterCidrs: pods, ServiceCidr: services[0], ServiceCidrs: services,
		HeartbeatMillis: interval.Milliseconds(), Replica: n.srv.cfg.Lifetime.Replica,
	}
	if node, ok := n.srv.cfg.View.Node(n.node); ok {
		w.PodCidr, w.PodCidrs = node.Spec.PodCIDR, node.Spec.PodCIDRs
	}
	return w
}

// splitPrefixes splits a comma-separated list of prefixes.
func splitPrefixes(list string) []string {
	out := strings.Split(list, ",")
	for i := range out {
		out[i] = strings.TrimSpace(out[i])
	}
	return out
}

// End ends the session with the error err as the cause.
func (n *nodeSession) End(err error) { n.cancel(err) }

// QueueMessage queues a message to the agent. If too many messages are queued, the session ends.
func (n *nodeSession) QueueMessage(m *fleetv1.ControlMessage) {
	n.out.mu.Lock()
	n.out.messages = append(n.out.messages, m)
	tooMany := len(n.out.messages) > wire.MaxOutbox
	n.out.mu.Unlock()
	if tooMany {
		n.End(wire.ErrSlowAgent)
	}
	n.WakeSender()
}

// WakeSender implements assign.Subscriber.
func (n *nodeSession) WakeSender() { n.out.wake.Send() }

// HandleNodeChange implements assign.Subscriber.
func (n *nodeSession) HandleNodeChange(becameReady bool) {
	n.reporter.SyncNode() // the stored Node may differ from the agent's report
	if becameReady {      // the pods may have been marked as not ready before
		n.reporter.RestoreReadiness(podNames(n.srv.cfg.View.PodsOfNode(n.node)))
	}
}

func podNames(pods []*v1.Pod) []types.NamespacedName {
	names := make([]types.NamespacedName, 0, len(pods))
	for _, pod := range pods {
		names = append(names, types.NamespacedName{Namespace: pod.Namespace, Name: pod.Name})
	}
	return names
}

// IsOwnWrite implements assign.Subscriber.
func (n *nodeSession) IsOwnWrite(uid types.UID, oldRevision, newRevision uint64) bool {
	return n.reporter.IsOwnWrite(uid, oldRevision, newRevision)
}

// sendMessage sends one message. It blocks while the agent does not receive.
func (n *nodeSession) sendMessage(m *fleetv1.ControlMessage) error {
	n.out.sendMu.Lock()
	defer n.out.sendMu.Unlock()
	return n.out.stream.Send(m)
}

// sendChanges sends the full assignment, and then every change and queued message, until ctx ends.
func (n *nodeSession) sendChanges(ctx context.Context, feed *assign.Feed) error {
	defer feed.Release()
	for {
		u, err := feed.ComputeUpdate()
		if err != nil {
			return err
		}
		n.reporter.RestoreReadiness(u.Pods)
		for _, set := range u.Sets {
			objects := &fleetv1.ControlMessage_Objects{Objects: set}
			if err := n.sendMessage(&fleetv1.ControlMessage{Kind: objects}); err != nil {
				return err
			}
		}
		if u.Revision != 0 {
			synced := &fleetv1.ControlMessage_Synced{Synced: &fleetv1.Synced{Revision: u.Revision}}
			if err := n.sendMessage(&fleetv1.ControlMessage{Kind: synced}); err != nil {
				return err
			}
		}
		if u.Full {
			n.releaseSlot()
		}
		for _, uid := range u.Stopping {
			n.srv.cfg.Gate.RequestStop(uid, func() { n.allowStop(uid) })
		}
		for _, m := range n.takeMessages() {
			if err := n.sendMessage(m); err != nil {
				return err
			}
		}
		select {
		case <-n.out.wake:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// allowStop sends the permission to stop the pod to the agent. The StopGate calls it with its lock
// held.
func (n *nodeSession) allowStop(uid types.UID) {
	n.QueueMessage(&fleetv1.ControlMessage{Kind: &fleetv1.ControlMessage_StopGate{
		StopGate: &fleetv1.StopGate{Uid: string(uid)}}})
}

func (n *nodeSession) takeMessages() []*fleetv1.ControlMessage {
	n.out.mu.Lock()
	defer n.out.mu.Unlock()
	messages := n.out.messages
	n.out.messages = nil
	return messages
}
