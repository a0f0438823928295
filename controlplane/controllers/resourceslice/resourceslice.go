// Package resourceslice deletes ResourceSlices that no driver maintains any more. These are the
// slices of drivers that have been unregistered on their node for longer than a restart takes, and
// of nodes that no longer exist. Otherwise the scheduler would place pods where no driver can
// prepare their devices.
package resourceslice

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	resourcev1 "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/cache"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/controllers/engine"
)

// Drivers is the annotation of a Node in which its agent lists the registered DRA drivers,
// separated by commas.
const Drivers = "keelson.dev/dra-drivers"

// Grace is how long a driver or a Node must have been absent before its ResourceSlices are deleted.
// The kubelet uses the same time.
const Grace = 30 * time.Second

// nodeIndex indexes ResourceSlices by their node.
const nodeIndex = "resourceslice-node"

// DeletionReason is the reason why the ResourceSlices of a driver on a node are deleted.
type DeletionReason string

// Reasons to delete ResourceSlices. Kept means that they are not deleted.
const (
	Kept       DeletionReason = ""
	NoNode     DeletionReason = "their node no longer exists"
	DriverGone DeletionReason = "their driver is not registered on the node"
)

// Judge returns why the ResourceSlices of a driver on a node are deleted, or Kept. node is nil if
// the Node does not exist. A Node without annotation Drivers has an agent of an older release or
// one that has never connected; its slices are kept.
func Judge(node *corev1.Node, driver string) DeletionReason {
	if node == nil {
		return NoNode
	}
	names, tells := node.Annotations[Drivers]
	if !tells || slices.Contains(strings.Split(names, ","), driver) {
		return Kept
	}
	return DriverGone
}

// New returns the controller that deletes abandoned ResourceSlices.
func New(d engine.Deps) *engine.Descriptor {
	all := client.Informer[*resourcev1.ResourceSlice](d.Informers)
	nodes := client.Informer[*corev1.Node](d.Informers)
	engine.Index(all, nodeIndex, func(o api.Object) []string {
		if s, ok := o.(*resourcev1.ResourceSlice); ok && s.Spec.NodeName != nil {
			return []string{*s.Spec.NodeName}
		}
		return nil
	})
	return &engine.Descriptor{
		Name:    "resourceslice-cleanup-controller",
		Workers: 2,
		Watches: []engine.Watch{
			engine.OnInformer(all, func(c engine.Change[*resourcev1.ResourceSlice]) []engine.Key {
				if c.New.Spec.NodeName == nil {
					return nil
				}
				return []engine.Key{{Name: *c.New.Spec.NodeName}}
			}),
			engine.OnInformer(nodes, func(c engine.Change[*corev1.Node]) []engine.Key {
				if c.Type == engine.Updated {
					now, tells := c.New.Annotations[Drivers]
					if before, told := c.Old.Annotations[Drivers]; tells == told && now == before {
						return nil
					}
				}
				return []engine.Key{{Name: c.New.Name}}
			}),
		},
		Rules: []rbacv1.PolicyRule{
			{APIGroups: []string{"resource.k8s.io"}, Resources: []string{"resourceslices"},
				Verbs: []string{"get", "list", "watch", "delete"}},
			{APIGroups: []string{""}, Resources: []string{"nodes"}, Verbs: []string{"get", "list", "watch"}},
		},
		Lead: func(t *engine.Term) engine.Reconcile {
			c := &cleaner{term: t, slices: all, nodes: nodes, since: map[string]map[string]time.Time{}}
			return c.reconcileNodeSlices
		},
	}
}

// cleaner reconciles the ResourceSlices of nodes during one term of leadership. Every term has a
// new cleaner.
type cleaner struct {
	term          *engine.Term
	slices, nodes cache.SharedIndexInformer

	mu    sync.Mutex
	since map[string]map[string]time.Time // when the absence of a driver was first observed, by node and driver
}

// reconcileNodeSlices deletes the ResourceSlices of a node that have been abandoned for Grace.
// again is the delay until the next check.
func (c *cleaner) reconcileNodeSlices(ctx context.Context, key engine.Key) (again time.Duration, err error) {
	node, _ := engine.Cached[*corev1.Node](c.nodes, "", key.Name)
	all := engine.CachedBy[*resourcev1.ResourceSlice](c.slices, nodeIndex, key.Name)
	left := map[string]DeletionReason{}
	for _, s := range all {
		if why := Judge(node, s.Spec.Driver); why != Kept {
			left[s.Spec.Driver] = why
		}
	}
	due, again := c.overdueDrivers(key.Name, left, c.term.Now())
	for _, s := range all {
		if !due[s.Spec.Driver] || s.DeletionTimestamp != nil {
			continue
		}
		err := client.Delete[*resourcev1.ResourceSlice](ctx, c.term.Client, "", s.Name,
			metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: &s.UID}})
		if err != nil && !apierrors.IsNotFound(err) && !apierrors.IsConflict(err) {
			return 0, fmt.Errorf("deleting ResourceSlice %s of driver %s on node %s: %w", s.Name,
				s.Spec.Driver, key.Name, err)
		}
		c.term.Log.Info("deleted an abandoned ResourceSlice", "resourceslice", s.Name, "driver", s.Spec.Driver, "node",
			key.Name, "because", left[s.Spec.Driver])
	}
	return again, nil
}

// overdueDrivers returns the drivers with ResourceSlices on a node that have been abandoned for at
// least Grace. abandoned has all drivers with abandoned ResourceSlices on the node. again is the
// time until the next driver is overdue, or 0.
func (c *cleaner) overdueDrivers(node string, abandoned map[string]DeletionReason, now time.Time) (
	due map[string]bool, again time.Duration,
) {
	c.mu.Lock()
	defer c.mu.Unlock()
	before, next := c.since[node], map[string]time.Time{}
	delete(c.since, node)
	due = map[string]bool{}
	for driver := range abandoned {
		since, known := before[driver]
		if !known {
			since = now
		}
		next[driver] = since
		switch wait := since.Add(Grace).Sub(now); {
		case wait <= 0:
			due[driver] = true
		case again == 0 || wait < again:
			again = wait
		}
	}
	if len(next) > 0 {
		c.since[node] = next
	}
	return due, again
}
