package volumeexpansion

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/client-go/tools/cache"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/controllers"
)

// New returns the controller. Without calls no driver is served.
func New(d controllers.Deps, calls api.NodeDrivers) *controllers.Controller {
	drivers, csiNodes := client.Informer[*storagev1.CSIDriver](d.Informers), client.Informer[*storagev1.CSINode](d.Informers)
	nodes := client.Informer[*corev1.Node](d.Informers)
	claims, volumes := client.Informer[*corev1.PersistentVolumeClaim](d.Informers), client.Informer[*corev1.PersistentVolume](d.Informers)
	return &controllers.Controller{
		Name:    "expand-controller",
		Workers: 2,
		Watches: []controllers.Watch{
			controllers.OnInformer(claims, func(c controllers.Change[*corev1.PersistentVolumeClaim]) []controllers.Key {
				if c.Type == controllers.Deleted || c.New.Status.Phase != corev1.ClaimBound {
					return nil
				}
				return controllers.Self(c)
			}),
			controllers.OnInformer(volumes, func(c controllers.Change[*corev1.PersistentVolume]) []controllers.Key {
				ref := c.New.Spec.ClaimRef
				if c.Type == controllers.Deleted || ref == nil {
					return nil
				}
				return []controllers.Key{{Namespace: ref.Namespace, Name: ref.Name}}
			}),
			// What is not done yet is tried again by itself.
			controllers.OnInformer(drivers, func(controllers.Change[*storagev1.CSIDriver]) []controllers.Key { return nil }),
			controllers.OnInformer(csiNodes, func(controllers.Change[*storagev1.CSINode]) []controllers.Key { return nil }),
			controllers.OnInformer(nodes, func(controllers.Change[*corev1.Node]) []controllers.Key { return nil }),
		},
		Rules: []rbacv1.PolicyRule{
			{APIGroups: []string{""}, Resources: []string{"persistentvolumes"}, Verbs: []string{"get", "list", "update", "watch"}},
			{APIGroups: []string{""}, Resources: []string{"persistentvolumeclaims"}, Verbs: []string{"get", "list", "watch"}},
			{APIGroups: []string{""}, Resources: []string{"persistentvolumeclaims/status"}, Verbs: []string{"update"}},
			{APIGroups: []string{""}, Resources: []string{"nodes"}, Verbs: []string{"get", "list", "watch"}},
			{APIGroups: []string{"storage.k8s.io"}, Resources: []string{"csidrivers", "csinodes"}, Verbs: []string{"get", "list", "watch"}},
			{APIGroups: []string{""}, Resources: []string{"events"}, Verbs: []string{"create", "patch", "update"}},
		},
		Lead: func(t *controllers.Term) controllers.Reconcile {
			g := &grower{term: t, calls: calls, drivers: drivers, csiNodes: csiNodes, nodes: nodes, claims: controllers.ViewOf[*corev1.PersistentVolumeClaim](t, claims),
				volumes: controllers.ViewOf[*corev1.PersistentVolume](t, volumes), told: map[controllers.Key]string{}}
			return g.reconcile
		},
	}
}

// grower is the thin shell of one leadership.
type grower struct {
	term  *controllers.Term
	calls api.NodeDrivers

	drivers, csiNodes, nodes cache.SharedIndexInformer

	claims  *controllers.View[*corev1.PersistentVolumeClaim]
	volumes *controllers.View[*corev1.PersistentVolume]

	mu   sync.Mutex
	told map[controllers.Key]string // what claims wait for, as it was told of
}

func (g *grower) reconcile(ctx context.Context, key controllers.Key) (time.Duration, error) {
	c, ok := g.claims.Get(key.Namespace, key.Name)
	var step Step
	if ok {
		v, _ := g.volumes.Get("", c.Spec.VolumeName)
		step = Plan(c, v, g.served(v), g.term.Now())
	}
	waits := ""
	if step.Status == nil && step.Volume == nil {
		waits = step.Message
	}
	if !g.isNew(key, waits) {
		return 0, nil // it goes on waiting, or there is nothing to do
	}
	if err := g.write(ctx, c, step); err != nil {
		if apierrors.IsConflict(err) || apierrors.IsNotFound(err) {
			return 0, controllers.Race("%s: %w", key, err)
		}
		return 0, fmt.Errorf("growing the volume of claim %s: %w", key, err)
	}
	if step.Reason != "" {
		g.term.Events.Event(c, corev1.EventTypeNormal, step.Reason, step.Message)
	}
	return 0, nil
}

func (g *grower) served(v *corev1.PersistentVolume) bool {
	if g.calls == nil || v == nil || v.Spec.CSI == nil {
		return false
	}
	d, _ := controllers.Cached[*storagev1.CSIDriver](g.drivers, "", v.Spec.CSI.Driver)
	return controllers.Served(d)
}

// mostNodes is how many nodes are asked for a volume that does not say where it is.
const mostNodes = 32

// grow has the driver grow a volume to what the claim asks for, and notes what it has then.
func (g *grower) grow(ctx context.Context, c *corev1.PersistentVolumeClaim, v *corev1.PersistentVolume) error {
	nodes, err := controllers.NodesReaching(v, g.csiNodes, g.nodes)
	if err != nil {
		return err
	}
	want, node := c.Spec.Resources.Requests[corev1.ResourceStorage], ""
	var res *csi.ControllerExpandVolumeResponse
	// Volumes written by hand may not say on which node they are.
	for _, node = range nodes[:min(len(nodes), mostNodes)] {
		res, err = controllers.DriverController(g.calls, node, v.Spec.CSI.Driver).ControllerExpandVolume(ctx, &csi.ControllerExpandVolumeRequest{
			VolumeId: v.Spec.CSI.VolumeHandle, CapacityRange: &csi.CapacityRange{RequiredBytes: want.Value()}})
		if status.Code(err) != codes.NotFound {
			break
		}
	}
	switch {
	case err != nil:
		return fmt.Errorf("node %s: %w", node, err)
	case res.GetNodeExpansionRequired():
		return fmt.Errorf("CSI driver %s wants the node to grow the file system, which nodes do not: install the driver's own resizer and a driver that grows mounted volumes by itself", v.Spec.CSI.Driver)
	case res.GetCapacityBytes() > want.Value():
		v.Spec.Capacity[corev1.ResourceStorage] = *resource.NewQuantity(res.GetCapacityBytes(), resource.BinarySI)
	}
	return nil
}

// isNew says whether a claim waits for something else than it was told of, or does not wait.
func (g *grower) isNew(key controllers.Key, waits string) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	before := g.told[key]
	delete(g.told, key)
	if waits != "" {
		g.told[key] = waits
	}
	return waits == "" || waits != before
}

func (g *grower) write(ctx context.Context, c *corev1.PersistentVolumeClaim, step Step) error {
	switch {
	case step.Status != nil:
		next := c.DeepCopy()
		next.Status = *step.Status
		return wrote(g.claims)(client.UpdateStatus(ctx, g.term.Client, next))
	case step.Volume != nil:
		if err := g.grow(ctx, c, step.Volume); err != nil {
			g.term.Events.Event(c, corev1.EventTypeWarning, "VolumeResizeFailed",
				fmt.Sprintf("resize volume %s failed: %s", step.Volume.Name, controllers.Words(err)))
			return err
		}
		return wrote(g.volumes)(client.Update(ctx, g.term.Client, step.Volume))
	}
	return nil
}

// wrote shows a view what was written through it: what comes next is decided by that.
func wrote[T api.Object](v *controllers.View[T]) func(o T, err error) error {
	return func(o T, err error) error {
		if err == nil {
			v.Wrote(o)
		}
		return err
	}
}
