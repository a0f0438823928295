package nodegateway

import (
	"context"
	"fmt"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"keelson.dev/keelson/controlplane/api/balancer"
	"keelson.dev/keelson/controlplane/client"
)

// A node that serves load balancer addresses is suspected before its session ends. After two missed
// heartbeats, its session record gets the time of suspicion, and other nodes take over the
// addresses. A node that was only slow loses nothing but these addresses. Everything else waits for
// the longer timeouts.

// doubtAfter returns the silence after which a node is suspected.
func (s *Server) doubtAfter() time.Duration {
	every, silence := s.pace()
	return min(2*every+every/5, silence)
}

// announces reports whether the node serves the address of any load balancer.
func (s *Server) announces(node string) bool {
	for _, o := range s.services.List() {
		if svc, ok := o.(*v1.Service); ok && svc.Annotations[balancer.AnnouncedBy] == node {
			return true
		}
	}
	return false
}

// doubt marks a node as suspected in its session record. It does nothing if the node has a session
// newer than epoch or serves no load balancer address.
func (s *Server) doubt(ctx context.Context, node string, epoch uint64) error {
	if !s.announces(node) {
		return nil
	}
	s.cfg.Log.Info("node is not heard: others answer for its addresses of load balancers", "node", node, "epoch", epoch)
	return s.writeUnheard(ctx, node, epoch, time.Now().UTC().Format(time.RFC3339))
}

// writeUnheard writes the time since which a node is suspected to the session record of epoch. With
// since = "", it removes the mark.
func (s *Server) writeUnheard(ctx context.Context, node string, epoch uint64, since string) error {
	c := s.cfg.Client.As(s.cfg.System)
	for range 5 {
		l, err := client.Get[*coordinationv1.Lease](ctx, c, v1.NamespaceNodeLease, node)
		if apierrors.IsNotFound(err) || err == nil && (recordOf(l).epoch != epoch || (l.Annotations[balancer.Unheard] == "") == (since == "")) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("fleet: node %s is not heard: read session record: %w", node, err)
		}
		l = l.DeepCopy()
		if delete(l.Annotations, balancer.Unheard); since != "" {
			l.Annotations[balancer.Unheard] = since
		}
		if _, err = client.Update(ctx, c, l); err == nil || apierrors.IsNotFound(err) {
			return nil
		}
		if !apierrors.IsConflict(err) {
			return fmt.Errorf("fleet: node %s is not heard: write session record: %w", node, err)
		}
	}
	return fmt.Errorf("fleet: node %s is not heard: too many conflicts on its session record", node)
}

// listen suspects the node if it has been quiet for too long, and withdraws the suspicion when the
// node is heard again. It returns the time until the next check.
func (x *session) listen(quiet time.Duration) time.Duration {
	limit := x.srv.doubtAfter()
	switch {
	case quiet >= limit && !x.doubted:
		x.doubted = true
		x.srv.doubts.arm(x.node, x.epoch, 0)
	case quiet < limit && x.doubted:
		x.doubted = false
		x.srv.doubts.disarm(x.node)
		x.put("heard again", 0, func(ctx context.Context) error { return x.srv.writeUnheard(ctx, x.node, x.epoch, "") })
	}
	if x.doubted {
		return limit / 8
	}
	return max(limit-quiet, time.Millisecond)
}
