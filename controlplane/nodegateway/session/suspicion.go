package session

import (
	"context"
	"fmt"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"keelson.dev/keelson/controlplane/api/balancer"
	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/internal/retry"
)

// A node that serves load balancer addresses is suspected before its session ends. After two missed
// heartbeats, the time is written to its session record, and other nodes take over the addresses. A
// node that was only slow loses nothing but these addresses. Everything else happens after the
// longer timeouts.

// suspicionTimeout returns the time without a message after which a node is suspected.
func (s *Server) suspicionTimeout() time.Duration {
	interval, silence := s.currentPace()
	return min(2*interval+interval/5, silence)
}

// announcesLoadBalancer reports whether the node serves the address of a load balancer.
func (s *Server) announcesLoadBalancer(node string) bool {
	for _, o := range s.services.List() {
		if svc, ok := o.(*v1.Service); ok && svc.Annotations[balancer.AnnouncedBy] == node {
			return true
		}
	}
	return false
}

// suspectNode marks a node as suspected in its session record. It does nothing if the node has a
// session newer than epoch or serves no load balancer address.
func (s *Server) suspectNode(ctx context.Context, node string, epoch uint64) error {
	if !s.announcesLoadBalancer(node) {
		return nil
	}
	s.cfg.Log.Info("node is suspected: others answer for its addresses of load balancers", "node", node, "epoch", epoch)
	return s.writeSuspicion(ctx, node, epoch, time.Now().UTC().Format(time.RFC3339))
}

// writeSuspicion records in the session record with this epoch since when the node is suspected. If
// since is empty, it deletes this mark.
func (s *Server) writeSuspicion(ctx context.Context, node string, epoch uint64, since string) error {
	c := s.cfg.Client
	return retry.OnConflict(retry.DefaultTries, func() (again bool, err error) {
		l, err := client.Get[*coordinationv1.Lease](ctx, c, v1.NamespaceNodeLease, node)
		if apierrors.IsNotFound(err) || err == nil &&
			(parseRecord(l).epoch != epoch || (l.Annotations[balancer.MissingSince] == "") == (since == "")) {
			return false, nil
		}
		if err != nil {
			return false, fmt.Errorf("fleet: node %s is suspected: read session record: %w", node, err)
		}
		l = l.DeepCopy()
		if delete(l.Annotations, balancer.MissingSince); since != "" {
			l.Annotations[balancer.MissingSince] = since
		}
		_, err = client.Update(ctx, c, l)
		switch {
		case err == nil, apierrors.IsNotFound(err):
			return false, nil
		case apierrors.IsConflict(err):
			return true, fmt.Errorf("fleet: node %s is suspected: too many conflicts on its session record", node)
		}
		return false, fmt.Errorf("fleet: node %s is suspected: write session record: %w", node, err)
	})
}

// updateSuspicion suspects the node if it has sent no message for too long, and withdraws the
// suspicion after its next message. quiet is the time since the last message. It returns the time
// until the next check.
func (n *nodeSession) updateSuspicion(quiet time.Duration) time.Duration {
	limit := n.srv.suspicionTimeout()
	switch {
	case quiet >= limit && !n.suspected:
		n.suspected = true
		n.srv.suspicions.startTimer(n.node, n.epoch, 0)
	case quiet < limit && n.suspected:
		n.suspected = false
		n.srv.suspicions.stopTimer(n.node)
		n.reporter.QueueWrite("heard again", 0,
			func(ctx context.Context) error { return n.srv.writeSuspicion(ctx, n.node, n.epoch, "") })
	}
	if n.suspected {
		return limit / 8
	}
	return max(limit-quiet, time.Millisecond)
}
