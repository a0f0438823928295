package session

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strconv"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/balancer"
	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/internal/retry"
)

// The session record of a node consists of annotations on its Lease in kube-node-lease. It contains
// the replica that has the session, and the session's epoch. It is written when the node joins, and
// not for heartbeats.
const (
	replicaAnnotation = "keelson.dev/session-replica"
	epochAnnotation   = "keelson.dev/session-epoch"
)

// sessionRecord is the session record of a node.
type sessionRecord struct {
	replica string
	epoch   uint64
}

// parseRecord returns the session record in a Lease, or the zero record.
func parseRecord(l *coordinationv1.Lease) sessionRecord {
	epoch, err := strconv.ParseUint(l.Annotations[epochAnnotation], 10, 64)
	if err != nil {
		return sessionRecord{}
	}
	return sessionRecord{l.Annotations[replicaAnnotation], epoch}
}

func (r sessionRecord) writeToLease(l *coordinationv1.Lease) {
	if l.Annotations == nil {
		l.Annotations = make(map[string]string)
	}
	delete(l.Annotations, balancer.MissingSince) // a node with a session is not suspected
	l.Annotations[replicaAnnotation] = r.replica
	l.Annotations[epochAnnotation] = strconv.FormatUint(r.epoch, 10)
}

// nextEpoch returns an epoch greater than before. It is at least the current time, so that it also
// increases if the record was deleted in between.
func nextEpoch(before uint64, now time.Time) uint64 {
	return max(before+1, uint64(max(now.UnixMilli(), 1)))
}

// writeSessionRecord makes this replica the holder of the node's session and returns the new epoch.
// If a node joins several replicas at the same time, the last write wins.
func (s *Server) writeSessionRecord(ctx context.Context, node string) (uint64, error) {
	c := s.cfg.Client
	owners, err := leaseOwners(ctx, c, node)
	if err != nil {
		return 0, err
	}
	var epoch uint64
	err = retry.OnConflict(recordTries, func() (again bool, err error) {
		l, err := client.Get[*coordinationv1.Lease](ctx, c, v1.NamespaceNodeLease, node)
		switch {
		case apierrors.IsNotFound(err):
			l = &coordinationv1.Lease{
				ObjectMeta: metav1.ObjectMeta{Namespace: v1.NamespaceNodeLease, Name: node, OwnerReferences: owners},
				Spec:       coordinationv1.LeaseSpec{HolderIdentity: &node},
			}
			r := sessionRecord{s.cfg.Lifetime.Replica, nextEpoch(0, time.Now())}
			r.writeToLease(l)
			epoch = r.epoch
			_, err = client.Create(ctx, c, l)
		case err == nil:
			l = l.DeepCopy()
			// the owner may be a deleted Node of the same name, and garbage collection would then
			// delete the Lease
			l.OwnerReferences = owners
			r := sessionRecord{s.cfg.Lifetime.Replica, nextEpoch(parseRecord(l).epoch, time.Now())}
			r.writeToLease(l)
			epoch = r.epoch
			_, err = client.Update(ctx, c, l)
		}
		switch {
		case err == nil:
			return false, nil
		case apierrors.IsConflict(err), apierrors.IsAlreadyExists(err), apierrors.IsNotFound(err):
			return true, errors.New("write session record: too many conflicts")
		}
		return false, fmt.Errorf("write session record: %w", err)
	})
	if err != nil {
		return 0, err
	}
	return epoch, nil
}

// recordTries is the number of attempts to write a session record. An attempt fails if another
// replica writes the record at the same time.
const recordTries = 10

// leaseOwners returns the owner reference for a node's Lease, or nil if the Node does not exist.
func leaseOwners(ctx context.Context, c *client.Client, node string) ([]metav1.OwnerReference, error) {
	n, err := client.Get[*v1.Node](ctx, c, "", node)
	switch {
	case apierrors.IsNotFound(err):
		return nil, nil
	case err != nil:
		return nil, fmt.Errorf("write session record: read node: %w", err)
	}
	return []metav1.OwnerReference{nodeOwnerReference(n)}, nil
}

// SetLeaseOwner makes the newly created Node n the owner of its Lease. If that fails, the next
// session does it.
func SetLeaseOwner(ctx context.Context, c *client.Client, n *v1.Node, log *slog.Logger) {
	l, err := client.Get[*coordinationv1.Lease](ctx, c, v1.NamespaceNodeLease, n.Name)
	if err == nil {
		l = l.DeepCopy()
		l.OwnerReferences = []metav1.OwnerReference{nodeOwnerReference(n)}
		_, err = client.Update(ctx, c, l)
	}
	if err != nil && ctx.Err() == nil {
		log.Warn("the Lease of a node has no owner yet", "node", n.Name, "err", err)
	}
}

func nodeOwnerReference(n *v1.Node) metav1.OwnerReference {
	return metav1.OwnerReference{APIVersion: "v1", Kind: "Node", Name: n.Name, UID: n.UID}
}

// markLost sets the condition Ready of a node to Unknown. heartbeat is the time of the last
// heartbeat, or zero if it is not known. markLost does nothing if the node has had a session newer
// than epoch. A wrong call does no harm: a live session sets Ready again.
func markLost(ctx context.Context, c *client.Client, node string, epoch uint64, heartbeat time.Time) error {
	return retry.OnConflict(retry.DefaultTries, func() (again bool, err error) {
		l, err := client.Get[*coordinationv1.Lease](ctx, c, v1.NamespaceNodeLease, node)
		if err != nil && !apierrors.IsNotFound(err) {
			return false, fmt.Errorf("fleet: node %s lost: read session record: %w", node, err)
		}
		if err == nil && parseRecord(l).epoch != epoch {
			return false, nil
		}
		n, err := client.Get[*v1.Node](ctx, c, "", node)
		if apierrors.IsNotFound(err) {
			return false, nil
		}
		if err != nil {
			return false, fmt.Errorf("fleet: node %s lost: read node: %w", node, err)
		}
		next := lostNodeStatus(&n.Status, heartbeat, metav1.Now())
		if next == nil {
			return false, nil
		}
		n = n.DeepCopy()
		n.Status = *next
		_, err = client.UpdateStatus(ctx, c, n)
		switch {
		case err == nil, apierrors.IsNotFound(err):
			return false, nil
		case apierrors.IsConflict(err):
			return true, fmt.Errorf("fleet: node %s lost: too many conflicts on its status", node)
		}
		return false, fmt.Errorf("fleet: node %s lost: write status: %w", node, err)
	})
}

// lostNodeStatus returns the status of a lost node, or nil if Ready is already Unknown. The
// heartbeat time of its conditions is set to heartbeat, unless the stored time is later. Heartbeats
// are not stored while a node is Ready, and replicas forget them after an hour.
func lostNodeStatus(stored *v1.NodeStatus, heartbeat time.Time, now metav1.Time) *v1.NodeStatus {
	ready := api.FindNodeCondition(stored.Conditions, v1.NodeReady)
	if ready != nil && ready.Status == v1.ConditionUnknown {
		return nil
	}
	out := stored.DeepCopy()
	if ready == nil {
		out.Conditions = append(out.Conditions, v1.NodeCondition{Type: v1.NodeReady})
	}
	for i := range out.Conditions {
		c := &out.Conditions[i]
		switch c.Type {
		case v1.NodeReady, v1.NodeMemoryPressure, v1.NodeDiskPressure, v1.NodePIDPressure:
			if c.Status != v1.ConditionUnknown {
				c.Status, c.LastTransitionTime = v1.ConditionUnknown, now
			}
			if c.LastHeartbeatTime.Time.Before(heartbeat) {
				c.LastHeartbeatTime = metav1.NewTime(heartbeat)
			}
			c.Reason, c.Message = "NodeStatusUnknown", "the agent's session with the control plane was lost"
		}
	}
	return out
}
