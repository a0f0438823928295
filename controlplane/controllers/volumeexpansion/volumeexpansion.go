package volumeexpansion

import (
	"context"
	"errors"
	"fmt"
	"slices"
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
	"keelson.dev/keelson/controlplane/controllers/engine"
	"keelson.dev/keelson/internal/saturate"
)

// New returns the controller that expands volumes. calls is the client with which CSI drivers are
// called through the agents of the nodes. If calls is nil, the controller calls no driver.
func New(d engine.Deps, calls api.NodeDrivers) *engine.Descriptor {
	drivers, csiNodes := client.Informer[*storagev1.CSIDriver](d.Informers),
		client.Informer[*storagev1.CSINode](d.Informers)
	nodes := client.Informer[*corev1.Node](d.Informers)
	claims, volumes := client.Informer[*corev1.PersistentVolumeClaim](d.Informers),
		client.Informer[*corev1.PersistentVolume](d.Informers)
	pods := client.Informer[*corev1.Pod](d.Informers)
	engine.Index(pods, engine.PodClaimIndex, engine.PodClaimKeys)
	return &engine.Descriptor{
		Name:    "expand-controller",
		Workers: 2,
		Watches: []engine.Watch{
			engine.OnInformer(claims, func(c engine.Change[*corev1.PersistentVolumeClaim]) []engine.Key {
				if c.Type == engine.Deleted || c.New.Status.Phase != corev1.ClaimBound {
					return nil
				}
				return engine.Self(c)
			}),
			engine.OnInformer(volumes, func(c engine.Change[*corev1.PersistentVolume]) []engine.Key {
				ref := c.New.Spec.ClaimRef
				if c.Type == engine.Deleted || ref == nil {
					return nil
				}
				return []engine.Key{{Namespace: ref.Namespace, Name: ref.Name}}
			}),
			engine.OnInformer(pods, func(c engine.Change[*corev1.Pod]) []engine.Key { return waitingFor(claims, c) }),
			// These informers are only read: unfinished expansions are retried.
			engine.OnInformer(drivers, func(engine.Change[*storagev1.CSIDriver]) []engine.Key { return nil }),
			engine.OnInformer(csiNodes, func(engine.Change[*storagev1.CSINode]) []engine.Key { return nil }),
			engine.OnInformer(nodes, func(engine.Change[*corev1.Node]) []engine.Key { return nil }),
		},
		Rules: []rbacv1.PolicyRule{
			{APIGroups: []string{""}, Resources: []string{"persistentvolumes"},
				Verbs: []string{"get", "list", "update", "watch"}},
			{APIGroups: []string{""}, Resources: []string{"persistentvolumeclaims"},
				Verbs: []string{"get", "list", "watch"}},
			{APIGroups: []string{""}, Resources: []string{"persistentvolumeclaims/status"}, Verbs: []string{"update"}},
			{APIGroups: []string{""}, Resources: []string{"nodes", "pods"}, Verbs: []string{"get", "list", "watch"}},
			{APIGroups: []string{""}, Resources: []string{"secrets"}, Verbs: []string{"get"}},
			{APIGroups: []string{"storage.k8s.io"}, Resources: []string{"csidrivers", "csinodes"},
				Verbs: []string{"get", "list", "watch"}},
			{APIGroups: []string{""}, Resources: []string{"events"}, Verbs: []string{"create", "patch", "update"}},
		},
		Lead: func(t *engine.Term) engine.Reconcile {
			g := &grower{term: t, calls: t.Drivers(calls), drivers: drivers, csiNodes: csiNodes, nodes: nodes,
				pods: pods, claims: engine.ViewOf[*corev1.PersistentVolumeClaim](t, claims),
				volumes: engine.ViewOf[*corev1.PersistentVolume](t, volumes), lastWaits: map[engine.Key]string{}}
			return g.reconcileClaim
		},
	}
}

// waitingFor returns the keys of the claims of a running pod that wait for expansion on a node.
func waitingFor(claims cache.SharedIndexInformer, c engine.Change[*corev1.Pod]) (keys []engine.Key) {
	if c.Type == engine.Deleted || !hasMountedVolumes(c.New) {
		return nil
	}
	for _, name := range engine.PodClaimKeys(c.New) {
		name = name[len(c.New.Namespace)+1:]
		if pvc, ok := engine.Cached[*corev1.PersistentVolumeClaim](claims, c.New.Namespace, name); ok && onNodes(pvc) {
			keys = append(keys, engine.Key{Namespace: pvc.Namespace, Name: pvc.Name})
		}
	}
	return keys
}

// hasMountedVolumes reports whether the node of pod p has mounted the pod's volumes: the pod's
// containers run.
func hasMountedVolumes(p *corev1.Pod) bool {
	return p.Spec.NodeName != "" && p.Status.Phase == corev1.PodRunning
}

// grower reconciles claims during one term of leadership. Every term has a new grower.
type grower struct {
	term  *engine.Term
	calls *engine.LeaderDrivers

	drivers, csiNodes, nodes, pods cache.SharedIndexInformer

	claims  *engine.View[*corev1.PersistentVolumeClaim]
	volumes *engine.View[*corev1.PersistentVolume]

	mu        sync.Mutex
	lastWaits map[engine.Key]string // text of the last event about what each claim waits for
}

func (g *grower) reconcileClaim(ctx context.Context, key engine.Key) (time.Duration, error) {
	c, ok := g.claims.Get(key.Namespace, key.Name)
	var step Step
	var v *corev1.PersistentVolume
	if ok {
		v, _ = g.volumes.Get("", c.Spec.VolumeName)
		step = PlanExpansion(c, v, g.calls != nil && engine.IsVolumeServedByAgent(g.drivers, v), g.term.Now())
	}
	waits := ""
	if step.Status == nil && !step.Grow && !step.OnNodes {
		waits = step.Message
	}
	if !g.isNew(key, waits) {
		return 0, nil // the claim still waits for the same reason, or there is nothing to do
	}
	var err error
	switch {
	case step.Grow:
		err = g.expandVolume(ctx, c, v.DeepCopy())
	case step.OnNodes:
		err = g.growOnNodes(ctx, c, v)
	default:
		err = g.writeStep(ctx, c, step)
	}
	if err != nil {
		if apierrors.IsConflict(err) || apierrors.IsNotFound(err) {
			return 0, engine.RaceError("%s: %w", key, err)
		}
		return 0, fmt.Errorf("expanding the volume of claim %s: %w", key, err)
	}
	return 0, nil
}

// writeStep writes the claim status that step contains to claim c, and records the event of step.
func (g *grower) writeStep(ctx context.Context, c *corev1.PersistentVolumeClaim, step Step) error {
	if step.Status != nil {
		next := c.DeepCopy()
		next.Status = *step.Status
		if err := recordResult(g.claims)(client.UpdateStatus(ctx, g.term.Client, next)); err != nil {
			return err
		}
	}
	if step.Reason != "" {
		g.term.Events.Event(c, corev1.EventTypeNormal, step.Reason, step.Message)
	}
	return nil
}

// expandVolume calls the driver to expand volume v to the size that claim c requests, and stores
// the new size in v and c.
func (g *grower) expandVolume(ctx context.Context, c *corev1.PersistentVolumeClaim, v *corev1.PersistentVolume) error {
	got, byNodes, err := g.callExpand(ctx, c, v)
	if err != nil {
		return g.recordFailure(ctx, c, v, false, err)
	}
	if has := v.Spec.Capacity[corev1.ResourceStorage]; got.Cmp(has) > 0 {
		v.Spec.Capacity[corev1.ResourceStorage] = got
		if v, err = client.Update(ctx, g.term.Client, v); err != nil {
			return err
		}
		g.volumes.RecordWrite(v)
	}
	return g.writeStep(ctx, c, Grown(c, v, byNodes, g.term.Now()))
}

// callExpand calls ControllerExpandVolume for volume v of claim c. It returns the new size. byNodes
// reports that nodes must expand the volume too.
func (g *grower) callExpand(ctx context.Context, c *corev1.PersistentVolumeClaim, v *corev1.PersistentVolume) (
	got resource.Quantity, byNodes bool, err error,
) {
	want := c.Spec.Resources.Requests[corev1.ResourceStorage]
	q := &csi.ControllerExpandVolumeRequest{VolumeId: v.Spec.CSI.VolumeHandle,
		CapacityRange: &csi.CapacityRange{RequiredBytes: saturate.Value(&want)}}
	if q.Secrets, err = engine.ReadDriverSecret(ctx, g.term.Client, v.Spec.CSI.ControllerExpandSecretRef); err != nil {
		// drop the type of the error: the caller would treat NotFound as a conflict of the claim
		return got, false, errors.New(err.Error())
	}
	if v.Spec.VolumeMode != nil && *v.Spec.VolumeMode == corev1.PersistentVolumeBlock {
		q.VolumeCapability = &csi.VolumeCapability{
			AccessType: &csi.VolumeCapability_Block{Block: &csi.VolumeCapability_BlockVolume{}},
			AccessMode: &csi.VolumeCapability_AccessMode{Mode: csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER}}
	}
	var res *csi.ControllerExpandVolumeResponse
	node, err := engine.CallReachingNodes(v, g.csiNodes, g.nodes, func(node string) (err error) {
		res, err = engine.DriverController(g.calls, node, v.Spec.CSI.Driver).ControllerExpandVolume(ctx, q)
		return err
	})
	switch {
	case err != nil && node == "":
		return got, false, err
	case status.Code(err) == codes.Unimplemented: // the driver only supports expansion on nodes
		return want, true, nil
	case err != nil:
		return got, false, fmt.Errorf("node %s: %w", node, err)
	case res.GetCapacityBytes() > saturate.Value(&want):
		want = *resource.NewQuantity(res.GetCapacityBytes(), resource.BinarySI)
	}
	return want, res.GetNodeExpansionRequired(), nil
}

// growOnNodes calls NodeExpandVolume on every node with a running pod that uses volume v. If there
// is no such node, claim c waits: the next node that mounts the volume expands it then, and is
// called here for confirmation.
func (g *grower) growOnNodes(ctx context.Context, c *corev1.PersistentVolumeClaim, v *corev1.PersistentVolume) error {
	if g.calls == nil {
		return nil
	}
	var nodes []string
	for _, p := range engine.CachedBy[*corev1.Pod](g.pods, engine.PodClaimIndex, c.Namespace+"/"+c.Name) {
		if hasMountedVolumes(p) && !slices.Contains(nodes, p.Spec.NodeName) {
			nodes = append(nodes, p.Spec.NodeName)
		}
	}
	if len(nodes) == 0 {
		return nil
	}
	slices.Sort(nodes)
	size := v.Spec.Capacity[corev1.ResourceStorage]
	for _, node := range nodes {
		_, err := engine.DriverNode(g.calls, node, v.Spec.CSI.Driver).NodeExpandVolume(ctx,
			&csi.NodeExpandVolumeRequest{
				VolumeId:      v.Spec.CSI.VolumeHandle,
				CapacityRange: &csi.CapacityRange{RequiredBytes: saturate.Value(&size)}})
		if err != nil {
			return g.recordFailure(ctx, c, v, true, fmt.Errorf("node %s: %w", node, err))
		}
	}
	step := settledStep(c, v.Spec.Capacity)
	step.Reason, step.Message = "FileSystemResizeSuccessful",
		fmt.Sprintf("volume %s has %s, also on its node", v.Name, size.String())
	return g.writeStep(ctx, c, step)
}

// recordFailure records an event of claim c about err, the error of a failed call, and returns err.
// If the driver has responded, it also writes the error to the claim's status. byNode is true for
// an expansion on a node.
func (g *grower) recordFailure(
	ctx context.Context, c *corev1.PersistentVolumeClaim, v *corev1.PersistentVolume, byNode bool, err error,
) error {
	words := fmt.Sprintf("resize volume %s failed: %s", v.Name, engine.DriverErrorText(err))
	g.term.Events.Event(c, corev1.EventTypeWarning, "VolumeResizeFailed", words)
	if !isFinalAnswer(err) {
		return err
	}
	if noted := g.writeStep(ctx, c, Failed(c, byNode, isInfeasible(err), words, g.term.Now())); noted != nil {
		return noted
	}
	return err
}

// isFinalAnswer reports whether err is a response of the driver, which would be the same for a
// repeated call.
func isFinalAnswer(err error) bool {
	switch status.Code(err) {
	case codes.Unknown, codes.Unavailable, codes.DeadlineExceeded, codes.Canceled, codes.Aborted:
		return false
	}
	return true
}

// isInfeasible reports whether err means that the driver can never perform the requested expansion.
func isInfeasible(err error) bool {
	switch status.Code(err) {
	case codes.InvalidArgument, codes.OutOfRange, codes.NotFound:
		return true
	}
	return false
}

// isNew reports whether an event of a claim must be recorded. waits is the text about what the
// claim waits for; "" means that it does not wait. The result is false only for a text that equals
// the text of the claim's last event. isNew stores waits as that text.
func (g *grower) isNew(key engine.Key, waits string) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	before := g.lastWaits[key]
	delete(g.lastWaits, key)
	if waits != "" {
		g.lastWaits[key] = waits
	}
	return waits == "" || waits != before
}

// recordResult returns a function that takes the result of a write: it records the stored object in
// view v, and returns the error of the write.
func recordResult[T api.Object](v *engine.View[T]) func(o T, err error) error {
	return func(o T, err error) error {
		if err == nil {
			v.RecordWrite(o)
		}
		return err
	}
}
