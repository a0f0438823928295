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

// The session record of a node is annotations on its Lease in kube-node-lease: the replica that has
// the session, and the session's epoch. It is written when the node joins, never for a heartbeat.
const (
	replicaAnnotation = "keelson.dev/session-replica"
	epochAnnotation   = "keelson.dev/session-epoch"
)

// record is the session record of a node.
type record struct {
	replica string
	epoch   uint64
}

// recordOf returns the session record in a Lease, or the zero record.
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
	delete(l.Annotations, balancer.Unheard) // a node with a session is not suspected
	l.Annotations[replicaAnnotation] = r.replica
	l.Annotations[epochAnnotation] = strconv.FormatUint(r.epoch, 10)
}

// nextEpoch returns an epoch greater than before. It is based on the time, so it also increases if
// the record was deleted in between.
func nextEpoch(before uint64, now time.Time) uint64 {
	return max(before+1, uint64(max(now.UnixMilli(), 1)))
}

// joinRecord makes this replica the holder of the node's session and returns the new epoch. Of
// concurrent joins on several replicas, the last write wins.
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
			l.OwnerReferences = owners // the owner may be a deleted Node of the same name, and garbage collection would delete the Lease
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

// ownersOfLease returns the owner reference for a node's Lease, or nil while the Node does not
// exist.
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

// ownLease sets the owner of the Lease of a newly created Node. If it fails, the next session does
// it.
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

// markLost sets Ready=Unknown with the time of the last heartbeat; zero = unknown. It does nothing
// if the node has had a session newer than epoch. A wrong call is harmless: a live session sets
// Ready again.
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
