package nodegateway

import (
	"context"
	"fmt"
	"strconv"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/api/balancer"
	"keelson.dev/keelson/controlplane/client"
)

// The session record of a node is the Lease of its name in kube-node-lease. It is written when the node joins, never on
// a heartbeat, and says which replica has the session and in which epoch.
const (
	replicaAnnotation = "keelson.dev/session-replica"
	epochAnnotation   = "keelson.dev/session-epoch"
)

// record is a session record.
type record struct {
	replica string
	epoch   uint64
}

// recordOf reads the record in a Lease; the zero record when none exists.
func recordOf(l *coordinationv1.Lease) record {
	epoch, err := strconv.ParseUint(l.Annotations[epochAnnotation], 10, 64)
	if err != nil {
		return record{}
	}
	return record{l.Annotations[replicaAnnotation], epoch}
}

func (r record) writeTo(l *coordinationv1.Lease) {
	if l.Annotations == nil {
		l.Annotations = make(map[string]string)
	}
	delete(l.Annotations, balancer.Unheard) // who has a session is heard
	l.Annotations[replicaAnnotation] = r.replica
	l.Annotations[epochAnnotation] = strconv.FormatUint(r.epoch, 10)
}

// nextEpoch is greater than the one before, also when the record was deleted in between.
func nextEpoch(before uint64, now time.Time) uint64 {
	return max(before+1, uint64(max(now.UnixMilli(), 1)))
}

// joinRecord makes this replica the holder of the node's session and returns the epoch. Only a join elsewhere
// at the same moment can come in between; the later write wins.
func (s *Server) joinRecord(ctx context.Context, node string) (uint64, error) {
	c := s.cfg.Client.As(s.cfg.System)
	owners, err := ownersOfLease(ctx, c, node)
	if err != nil {
		return 0, err
	}
	for range 10 {
		l, err := client.Get[*coordinationv1.Lease](ctx, c, v1.NamespaceNodeLease, node)
		switch {
		case apierrors.IsNotFound(err):
			l = &coordinationv1.Lease{
				ObjectMeta: metav1.ObjectMeta{Namespace: v1.NamespaceNodeLease, Name: node, OwnerReferences: owners},
				Spec:       coordinationv1.LeaseSpec{HolderIdentity: &node},
			}
			r := record{s.cfg.Replica, nextEpoch(0, time.Now())}
			r.writeTo(l)
			_, err = client.Create(ctx, c, l)
			if err == nil {
				return r.epoch, nil
			}
		case err == nil:
			l = l.DeepCopy()
			l.OwnerReferences = owners // of an earlier Node of the name, garbage collection would take it away
			r := record{s.cfg.Replica, nextEpoch(recordOf(l).epoch, time.Now())}
			r.writeTo(l)
			_, err = client.Update(ctx, c, l)
			if err == nil {
				return r.epoch, nil
			}
		}
		if !apierrors.IsConflict(err) && !apierrors.IsAlreadyExists(err) && !apierrors.IsNotFound(err) {
			return 0, fmt.Errorf("write session record: %w", err)
		}
	}
	return 0, fmt.Errorf("write session record: too many conflicts")
}

// ownersOfLease is the Node that a Lease goes with; none while there is no Node.
func ownersOfLease(ctx context.Context, c *client.Client, node string) ([]metav1.OwnerReference, error) {
	n, err := client.Get[*v1.Node](ctx, c, "", node)
	switch {
	case apierrors.IsNotFound(err):
		return nil, nil
	case err != nil:
		return nil, fmt.Errorf("write session record: read node: %w", err)
	}
	return []metav1.OwnerReference{nodeOwner(n)}, nil
}

// ownLease gives the Lease of a node that was just made its owner. Where that fails the next session does it.
func (s *Server) ownLease(ctx context.Context, n *v1.Node) {
	c := s.cfg.Client.As(s.cfg.System)
	l, err := client.Get[*coordinationv1.Lease](ctx, c, v1.NamespaceNodeLease, n.Name)
	if err == nil {
		l = l.DeepCopy()
		l.OwnerReferences = []metav1.OwnerReference{nodeOwner(n)}
		_, err = client.Update(ctx, c, l)
	}
	if err != nil && ctx.Err() == nil {
		s.cfg.Log.Warn("the Lease of a node has no owner yet", "node", n.Name, "err", err)
	}
}

func nodeOwner(n *v1.Node) metav1.OwnerReference {
	return metav1.OwnerReference{APIVersion: "v1", Kind: "Node", Name: n.Name, UID: n.UID}
}

// markLost writes Ready=Unknown, with the time of the last heartbeat, unless the node has had a newer session than epoch
// since. It is safe to be wrong: a session that lives writes its node Ready again. heartbeat is zero when it is not known.
func markLost(ctx context.Context, c *client.Client, node string, epoch uint64, heartbeat time.Time) error {
	for range 5 {
		l, err := client.Get[*coordinationv1.Lease](ctx, c, v1.NamespaceNodeLease, node)
		if err != nil && !apierrors.IsNotFound(err) {
			return fmt.Errorf("fleet: node %s lost: read session record: %w", node, err)
		}
		if err == nil && recordOf(l).epoch != epoch {
			return nil
		}
		n, err := client.Get[*v1.Node](ctx, c, "", node)
		if apierrors.IsNotFound(err) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("fleet: node %s lost: read node: %w", node, err)
		}
		status := lostNodeStatus(&n.Status, heartbeat, metav1.Now())
		if status == nil {
			return nil
		}
		n = n.DeepCopy()
		n.Status = *status
		_, err = client.UpdateStatus(ctx, c, n)
		if err == nil || apierrors.IsNotFound(err) {
			return nil
		}
		if !apierrors.IsConflict(err) {
			return fmt.Errorf("fleet: node %s lost: write status: %w", node, err)
		}
	}
	return fmt.Errorf("fleet: node %s lost: too many conflicts on its status", node)
}
