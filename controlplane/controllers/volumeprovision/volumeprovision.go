package volumeprovision

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/cache"
	"k8s.io/component-helpers/storage/volume"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/controllers"
	"keelson.dev/keelson/internal/saturate"
)

// The two sorts of keys.
const (
	claimKey  = "claim"
	volumeKey = "volume"
)

// ofVolume is an index of VolumeAttachments.
const ofVolume = "keelson.attachmentsOfVolume"

// New returns the controller. Without calls no driver is served.
func New(d controllers.Deps, calls api.NodeDrivers) *controllers.Controller {
	i := d.Informers
	claims, volumes := client.Informer[*corev1.PersistentVolumeClaim](i), client.Informer[*corev1.PersistentVolume](i)
	classes, drivers := client.Informer[*storagev1.StorageClass](i), client.Informer[*storagev1.CSIDriver](i)
	csiNodes, nodes := client.Informer[*storagev1.CSINode](i), client.Informer[*corev1.Node](i)
	attributeClasses := client.Informer[*storagev1.VolumeAttributesClass](i)
	capacities, attachments := client.Informer[*storagev1.CSIStorageCapacity](i), client.Informer[*storagev1.VolumeAttachment](i)
	controllers.Index(attachments, ofVolume, func(o api.Object) []string {
		if a, ok := o.(*storagev1.VolumeAttachment); ok && a.Spec.Source.PersistentVolumeName != nil {
			return []string{*a.Spec.Source.PersistentVolumeName}
		}
		return nil
	})
	controllers.Index(claims, ofSource, sourcesOf)
	unbound := func() []controllers.Key {
		var keys []controllers.Key
		for _, c := range controllers.CachedAll[*corev1.PersistentVolumeClaim](claims) {
			if c.Spec.VolumeName == "" {
				keys = append(keys, controllers.Key{Kind: claimKey, Namespace: c.Namespace, Name: c.Name})
			}
		}
		return keys
	}
	return &controllers.Controller{
		Name:    "volume-provisioner",
		Workers: 8,
		Watches: []controllers.Watch{
			controllers.OnInformer(claims, func(c controllers.Change[*corev1.PersistentVolumeClaim]) []controllers.Key {
				return keysOfClaim(c.New)
			}),
			controllers.OnInformer(volumes, func(c controllers.Change[*corev1.PersistentVolume]) []controllers.Key {
				return []controllers.Key{{Kind: volumeKey, Name: c.New.Name}}
			}),
			controllers.OnInformer(classes, func(controllers.Change[*storagev1.StorageClass]) []controllers.Key { return unbound() }),
			controllers.OnInformer(attributeClasses, func(controllers.Change[*storagev1.VolumeAttributesClass]) []controllers.Key { return unbound() }),
			controllers.OnInformer(drivers, func(controllers.Change[*storagev1.CSIDriver]) []controllers.Key { return unbound() }),
			controllers.OnInformer(csiNodes, func(c controllers.Change[*storagev1.CSINode]) []controllers.Key {
				if c.Type == controllers.Deleted {
					return nil
				}
				return unbound()
			}),
			controllers.OnInformer(nodes, func(c controllers.Change[*corev1.Node]) []controllers.Key {
				if c.Type != controllers.Updated || maps.Equal(c.Old.Labels, c.New.Labels) {
					return nil
				}
				return unbound() // by its labels drivers say where it is
			}),
			controllers.OnInformer(capacities, func(controllers.Change[*storagev1.CSIStorageCapacity]) []controllers.Key { return nil }),
			controllers.OnInformer(attachments, func(c controllers.Change[*storagev1.VolumeAttachment]) []controllers.Key {
				if from := c.New.Spec.Source.PersistentVolumeName; from != nil && c.Type == controllers.Deleted {
					return []controllers.Key{{Kind: volumeKey, Name: *from}}
				}
				return nil
			}),
		},
		Rules: []rbacv1.PolicyRule{
			{APIGroups: []string{""}, Resources: []string{"persistentvolumes"}, Verbs: []string{"create", "delete", "get", "list", "update", "watch"}},
			{APIGroups: []string{""}, Resources: []string{"persistentvolumeclaims"}, Verbs: []string{"get", "list", "update", "watch"}},
			{APIGroups: []string{""}, Resources: []string{"nodes"}, Verbs: []string{"get", "list", "watch"}},
			{APIGroups: []string{""}, Resources: []string{"secrets"}, Verbs: []string{"get"}},
			{APIGroups: []string{populatorGroup}, Resources: []string{"volumepopulators"}, Verbs: []string{"list"}},
			{APIGroups: []string{controllers.SnapshotGroup}, Resources: []string{"volumesnapshots", "volumesnapshotcontents"}, Verbs: []string{"get"}},
			{APIGroups: []string{"storage.k8s.io"}, Resources: []string{"storageclasses", "csidrivers", "csinodes", "csistoragecapacities", "volumeattachments", "volumeattributesclasses"}, Verbs: []string{"get", "list", "watch"}},
			{APIGroups: []string{""}, Resources: []string{"events"}, Verbs: []string{"create", "patch", "update"}},
		},
		Lead: func(t *controllers.Term) controllers.Reconcile {
			p := &provisioner{term: t, calls: t.Drivers(calls), classes: classes, drivers: drivers, csiNodes: csiNodes, nodes: nodes, capacities: capacities, attachments: attachments, attributeClasses: attributeClasses, claimsCache: claims,
				claims: controllers.ViewOf[*corev1.PersistentVolumeClaim](t, claims), volumes: controllers.ViewOf[*corev1.PersistentVolume](t, volumes)}
			return p.reconcile
		},
	}
}

// provisioner is the thin shell of one leadership.
type provisioner struct {
	term    *controllers.Term
	calls   *controllers.LeaderDrivers
	claims  *controllers.View[*corev1.PersistentVolumeClaim]
	volumes *controllers.View[*corev1.PersistentVolume]

	classes, drivers, csiNodes, nodes, capacities, attachments, attributeClasses, claimsCache cache.SharedIndexInformer
}

func (p *provisioner) reconcile(ctx context.Context, key controllers.Key) (time.Duration, error) {
	if p.calls == nil {
		return 0, nil
	}
	var err error
	if key.Kind == claimKey {
		err = p.claim(ctx, key)
	} else {
		err = p.volume(ctx, key.Name)
	}
	if apierrors.IsConflict(err) || apierrors.IsNotFound(err) {
		err = controllers.Race("%s: %w", key, err)
	}
	return 0, err
}

func (p *provisioner) served(driver string) bool {
	d, _ := controllers.Cached[*storagev1.CSIDriver](p.drivers, "", driver)
	return controllers.Served(d)
}

func (p *provisioner) claim(ctx context.Context, key controllers.Key) error {
	c, ok := p.claims.Get(key.Namespace, key.Name)
	if !ok {
		return nil
	}
	if err := p.unhold(ctx, c); err != nil {
		return err
	}
	b, err := begunFor(c)
	if err != nil {
		return err
	}
	class, _ := controllers.Cached[*storagev1.StorageClass](p.classes, "", volume.GetPersistentVolumeClaimClass(c))
	_, made := p.volumes.Get("", volumeName(c))
	if b == nil && !made && populated(c) {
		return p.leave(ctx, c)
	}
	if b == nil && !made && c.Spec.VolumeName == "" && c.Spec.DataSource != nil && c.DeletionTimestamp == nil && class != nil && p.served(class.Provisioner) &&
		waits(class) && c.Annotations[volume.AnnSelectedNode] == "" {
		o, err := p.origin(ctx, c, class)
		if err != nil {
			return p.failed(c, err)
		}
		_, err = p.place(ctx, c, o)
		return err
	}
	switch plan(c, class, b != nil, made, class != nil && p.served(class.Provisioner)) {
	case begin:
		return p.begin(ctx, c, class)
	case create:
		return p.create(ctx, c, class, b)
	case undo:
		return p.undo(ctx, c, b)
	case finish:
		return p.updateClaim(ctx, unnoted(c, false))
	}
	return nil
}

// begin chooses a node and notes it.
func (p *provisioner) begin(ctx context.Context, c *corev1.PersistentVolumeClaim, class *storagev1.StorageClass) error {
	if k := unknownParameter(class); k != "" {
		return p.failed(c, fmt.Errorf("parameter %s of StorageClass %s is not served for drivers that the agents serve: leave it out", k, class.Name))
	}
	given, err := secretsOf(class.Parameters, c)
	if err != nil {
		return p.failed(c, fmt.Errorf("StorageClass %q: %w", class.Name, err))
	}
	o, err := p.origin(ctx, c, class)
	if err != nil {
		return p.failed(c, err)
	}
	if done, err := p.place(ctx, c, o); err != nil || !done {
		return err
	}
	nodes := p.candidates(class)
	reach := slices.DeleteFunc(slices.Clone(nodes), func(n candidate) bool { return !o.reaches(n.node) })
	b, why := choose(c, class, reach)
	if why != "" && len(reach) < len(nodes) {
		why = "what the volume is to be made of is on other nodes: its claim's annotation " + controllers.ReachedFromAnnotation + " says on which; " + why
	}
	b.Snapshot, b.Volume, b.Secrets = o.snapshot, o.volume, given
	if why != "" {
		if err := p.failed(c, errors.New(why)); !waits(class) {
			return err
		}
		return p.updateClaim(ctx, unnoted(c, true))
	}
	if err := p.attributes(ctx, c, &b); err != nil {
		return p.failed(c, errors.New(controllers.Words(err)))
	}
	if err := p.hold(ctx, c); err != nil {
		return err
	}
	next, err := noted(c, b)
	if err != nil {
		return err
	}
	return p.updateClaim(ctx, next)
}

// attributes puts what the claim's class of attributes says to what a driver is asked for.
func (p *provisioner) attributes(ctx context.Context, c *corev1.PersistentVolumeClaim, b *begun) error {
	if c.Spec.VolumeAttributesClassName == nil || *c.Spec.VolumeAttributesClassName == "" {
		return nil
	}
	name := *c.Spec.VolumeAttributesClassName
	class, ok := controllers.Cached[*storagev1.VolumeAttributesClass](p.attributeClasses, "", name)
	switch {
	case !ok:
		return fmt.Errorf("VolumeAttributesClass %q does not exist: make it, or have the claim name another", name)
	case class.DriverName != b.Driver:
		return controllers.WrongAttributes(class, b.Driver)
	}
	if err := controllers.Modifies(ctx, p.calls, b.Node, b.Driver); err != nil {
		return err
	}
	b.Class, b.Mutable = name, class.Parameters
	return nil
}

// candidates are the nodes with the driver of a class.
func (p *provisioner) candidates(class *storagev1.StorageClass) []candidate {
	rooms := controllers.CachedAll[*storagev1.CSIStorageCapacity](p.capacities)
	var out []candidate
	for _, n := range controllers.CachedAll[*storagev1.CSINode](p.csiNodes) {
		d := controllers.DriverOn(n, class.Provisioner)
		node, ok := controllers.Cached[*corev1.Node](p.nodes, "", n.Name)
		if d == nil || !ok || node.DeletionTimestamp != nil {
			continue
		}
		c := candidate{node: node, driver: d}
		for _, r := range rooms {
			if r.StorageClassName != class.Name || r.Capacity == nil || r.NodeTopology == nil {
				continue
			}
			if sel, err := metav1.LabelSelectorAsSelector(r.NodeTopology); err == nil && sel.Matches(labelsOf(node)) {
				c.room = max(c.room, saturate.Value(r.Capacity))
			}
		}
		out = append(out, c)
	}
	return out
}

// segments are where the driver says now that the node is on which something was begun; nil where that is not known.
func (p *provisioner) segments(b *begun) map[string]string {
	has, _ := controllers.Cached[*storagev1.CSINode](p.csiNodes, "", b.Node)
	node, _ := controllers.Cached[*corev1.Node](p.nodes, "", b.Node)
	if d := controllers.DriverOn(has, b.Driver); controllers.Unlabelled(d, node) == "" {
		return controllers.Segments(d, node)
	}
	return nil
}

// way is the node by which a driver is asked about what was begun on one. A driver that does not tell where nodes are has its
// volumes nowhere in particular: where that node is lost or gone, another one is as good. ok is false when it is gone, and
// there is no other.
func (p *provisioner) way(b *begun) (node string, ok bool) {
	n, ok := controllers.Cached[*corev1.Node](p.nodes, "", b.Node)
	if ok && controllers.Answers(n) || len(b.Segments) > 0 {
		return b.Node, ok
	}
	var others []string
	for _, has := range controllers.CachedAll[*storagev1.CSINode](p.csiNodes) {
		d := controllers.DriverOn(has, b.Driver)
		if o, there := controllers.Cached[*corev1.Node](p.nodes, "", has.Name); there && controllers.Answers(o) && d != nil && len(d.TopologyKeys) == 0 {
			others = append(others, has.Name)
		}
	}
	if len(others) == 0 {
		return b.Node, ok
	}
	return slices.Min(others), true
}

// create asks the driver and makes the PersistentVolume. Both may be repeated.
func (p *provisioner) create(ctx context.Context, c *corev1.PersistentVolumeClaim, class *storagev1.StorageClass, b *begun) error {
	if !b.of(class) {
		return p.undo(ctx, c, b) // and begin anew, by what the class says now
	}
	node, ok := p.way(b)
	if !ok {
		p.term.Events.Event(c, corev1.EventTypeWarning, "ProvisioningFailed", fmt.Sprintf("node %s, on which volume %s was being made, is gone", b.Node, volumeName(c)))
		return p.updateClaim(ctx, unnoted(c, waits(class)))
	}
	if at := p.segments(b); at != nil && !maps.Equal(at, b.Segments) { // begun before that was known
		next := *b
		next.Segments = at
		moved, err := noted(c, next)
		if err != nil {
			return err
		}
		return p.updateClaim(ctx, moved)
	}
	q := request(c, b)
	var err error
	if q.Secrets, err = p.given(ctx, b.Secrets[forProvisioning]); err != nil {
		return p.failed(c, fmt.Errorf("StorageClass %q: %w", class.Name, err))
	}
	p.term.Events.Event(c, corev1.EventTypeNormal, "Provisioning",
		fmt.Sprintf("CSI driver %s on node %s is asked for a volume for claim \"%s/%s\"", b.Driver, node, c.Namespace, c.Name))
	res, err := controllers.DriverController(p.calls, node, b.Driver).CreateVolume(ctx, q)
	switch {
	case err != nil && controllers.Exhausted(err):
		err = p.failed(c, fmt.Errorf("StorageClass %q: %s", class.Name, controllers.Words(err)))
		if waits(class) {
			return p.updateClaim(ctx, unnoted(c, true)) // the scheduler's turn
		}
		if b.Snapshot != "" || b.Volume != "" {
			return err // its data are where they are
		}
		next, why := choose(c, class, p.candidates(class))
		if why != "" || next.Node == b.Node {
			return err
		}
		next.Class, next.Mutable, next.Secrets = b.Class, b.Mutable, b.Secrets
		moved, invalid := noted(c, next)
		if invalid != nil {
			return invalid
		}
		return p.updateClaim(ctx, moved)
	case err != nil:
		why := p.failed(c, fmt.Errorf("StorageClass %q: node %s: %s", class.Name, node, controllers.Words(err)))
		if status.Code(err) == codes.NotFound && p.sourceGone(ctx, c) {
			return p.updateClaim(ctx, unnoted(c, waits(class))) // it was deleted before it was held
		}
		return why
	case res.GetVolume().GetVolumeId() == "":
		return p.failed(c, fmt.Errorf("StorageClass %q: CSI driver %s made a volume without an id", class.Name, b.Driver))
	}
	pv, err := client.Create(ctx, p.term.Client, volumeOf(c, class, b, res.GetVolume()))
	if apierrors.IsAlreadyExists(err) {
		pv, err = client.Get[*corev1.PersistentVolume](ctx, p.term.Client, "", volumeName(c))
	}
	if err != nil {
		return p.failed(c, fmt.Errorf("PersistentVolume %s could not be made: %w", volumeName(c), err))
	}
	p.volumes.Wrote(pv)
	p.term.Events.Event(c, corev1.EventTypeNormal, "ProvisioningSucceeded", "Successfully provisioned volume "+pv.Name)
	return p.updateClaim(ctx, unnoted(c, false))
}

// undo has the driver delete what it may have made for a claim that wants it no more. What it has made it says when it is
// asked again: only then is its id known.
func (p *provisioner) undo(ctx context.Context, c *corev1.PersistentVolumeClaim, b *begun) error {
	pv, err := client.Get[*corev1.PersistentVolume](ctx, p.term.Client, "", volumeName(c))
	if err == nil { // it was made all the same, and is the binder's to release
		p.volumes.Wrote(pv)
		return p.updateClaim(ctx, unnoted(c, false))
	}
	if !apierrors.IsNotFound(err) {
		return err
	}
	node, ok := p.way(b)
	if !ok {
		return p.updateClaim(ctx, unnoted(c, false)) // with all that is on it
	}
	q := request(c, b)
	if q.Secrets, err = p.givenStill(ctx, b.Secrets[forProvisioning]); err != nil {
		return p.failed(c, err)
	}
	driver := controllers.DriverController(p.calls, node, b.Driver)
	res, err := driver.CreateVolume(ctx, q)
	if err == nil {
		_, err = driver.DeleteVolume(ctx, &csi.DeleteVolumeRequest{VolumeId: res.GetVolume().GetVolumeId(), Secrets: q.Secrets})
		if err != nil {
			return p.failed(c, fmt.Errorf("the volume that was begun cannot be deleted: %s", controllers.Words(err)))
		}
	} else if !controllers.Refused(err) {
		return p.failed(c, fmt.Errorf("whether CSI driver %s on node %s has begun a volume is not known: %s", b.Driver, node, controllers.Words(err)))
	}
	return p.updateClaim(ctx, unnoted(c, false))
}

// failed tells a claim why it has no volume, and returns that.
func (p *provisioner) failed(c *corev1.PersistentVolumeClaim, err error) error {
	p.term.Events.Event(c, corev1.EventTypeWarning, "ProvisioningFailed", "failed to provision volume: "+err.Error())
	return fmt.Errorf("volume of claim %s/%s: %w", c.Namespace, c.Name, err)
}

func (p *provisioner) volume(ctx context.Context, name string) error {
	v, ok := p.volumes.Get("", name)
	if !ok || v.Spec.CSI == nil || !p.served(v.Spec.CSI.Driver) || planVolume(v) == leave {
		return nil
	}
	// Data are deleted by what is so now, not by what was seen last.
	v, err := client.Get[*corev1.PersistentVolume](ctx, p.term.Client, "", name)
	if err != nil {
		return err
	}
	what := planVolume(v)
	if what == leave {
		return nil
	}
	if what == remove {
		gone, err := p.deleteVolume(ctx, v)
		if err != nil {
			p.term.Events.Event(v, corev1.EventTypeWarning, "VolumeFailedDelete", controllers.Words(err))
			return fmt.Errorf("deleting volume %s: %w", v.Name, err)
		}
		if !gone {
			return nil
		}
	}
	if v.DeletionTimestamp == nil {
		err := client.Delete[*corev1.PersistentVolume](ctx, p.term.Client, "", v.Name, metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: &v.UID}})
		if err != nil {
			return err
		}
		if v, err = client.Get[*corev1.PersistentVolume](ctx, p.term.Client, "", name); err != nil {
			if apierrors.IsNotFound(err) {
				return nil
			}
			return err
		}
	}
	next := v.DeepCopy()
	next.Finalizers = slices.DeleteFunc(next.Finalizers, func(f string) bool { return f == VolumeFinalizer })
	if len(next.Finalizers) == len(v.Finalizers) {
		return nil
	}
	next, err = client.Update(ctx, p.term.Client, next)
	if err != nil {
		return err
	}
	p.volumes.Wrote(next)
	return nil
}

// deleteVolume has a driver delete a volume. gone is false when nobody can, and nobody has said that the object shall go,
// and while the volume is attached to a node: it is deleted when it has been taken from there.
func (p *provisioner) deleteVolume(ctx context.Context, v *corev1.PersistentVolume) (gone bool, err error) {
	if len(controllers.CachedBy[*storagev1.VolumeAttachment](p.attachments, ofVolume, v.Name)) > 0 {
		return false, nil
	}
	node, err := controllers.NodeReaching(v, p.csiNodes, p.nodes)
	switch {
	case errors.Is(err, controllers.ErrNoNode) && v.DeletionTimestamp != nil:
		return true, nil
	case errors.Is(err, controllers.ErrNoNode):
		p.term.Events.Event(v, corev1.EventTypeWarning, "VolumeFailedDelete",
			"the node that has the volume is no part of the cluster any more: delete this object (kubectl delete pv "+v.Name+") to forget it")
		return false, nil
	case err != nil:
		return false, err
	}
	q := &csi.DeleteVolumeRequest{VolumeId: v.Spec.CSI.VolumeHandle}
	if q.Secrets, err = p.givenStill(ctx, deletionSecret(v)); err != nil {
		return false, err
	}
	_, err = controllers.DriverController(p.calls, node, v.Spec.CSI.Driver).DeleteVolume(ctx, q)
	if err != nil {
		return false, fmt.Errorf("node %s: %w", node, err)
	}
	return true, nil
}

func (p *provisioner) updateClaim(ctx context.Context, c *corev1.PersistentVolumeClaim) error {
	next, err := client.Update(ctx, p.term.Client, c)
	if err != nil {
		return err
	}
	p.claims.Wrote(next)
	p.term.Enqueue(controllers.Key{Kind: claimKey, Namespace: c.Namespace, Name: c.Name})
	return nil
}
