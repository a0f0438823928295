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
	"keelson.dev/keelson/controlplane/controllers/engine"
	"keelson.dev/keelson/internal/saturate"
)

// Kinds of keys in the controller's queue: PersistentVolumeClaims and PersistentVolumes.
const (
	claimKey  = "claim"
	volumeKey = "volume"
)

// ofVolume indexes VolumeAttachments by the name of their PersistentVolume.
const ofVolume = "keelson.attachmentsOfVolume"

// New returns the volume provisioner. calls is the client with which CSI drivers are called through
// the agents of the nodes. If calls is nil, the controller does nothing.
func New(d engine.Deps, calls api.NodeDrivers) *engine.Descriptor {
	i := d.Informers
	claims, volumes := client.Informer[*corev1.PersistentVolumeClaim](i), client.Informer[*corev1.PersistentVolume](i)
	classes, drivers := client.Informer[*storagev1.StorageClass](i), client.Informer[*storagev1.CSIDriver](i)
	csiNodes, nodes := client.Informer[*storagev1.CSINode](i), client.Informer[*corev1.Node](i)
	attributeClasses := client.Informer[*storagev1.VolumeAttributesClass](i)
	capacities, attachments := client.Informer[*storagev1.CSIStorageCapacity](i),
		client.Informer[*storagev1.VolumeAttachment](i)
	engine.Index(attachments, ofVolume, func(o api.Object) []string {
		if a, ok := o.(*storagev1.VolumeAttachment); ok && a.Spec.Source.PersistentVolumeName != nil {
			return []string{*a.Spec.Source.PersistentVolumeName}
		}
		return nil
	})
	engine.Index(claims, ofSource, sourcesOf)
	unbound := func() []engine.Key {
		var keys []engine.Key
		for _, c := range engine.CachedAll[*corev1.PersistentVolumeClaim](claims) {
			if c.Spec.VolumeName == "" {
				keys = append(keys, engine.Key{Kind: claimKey, Namespace: c.Namespace, Name: c.Name})
			}
		}
		return keys
	}
	return &engine.Descriptor{
		Name:    "volume-provisioner",
		Workers: 8,
		Watches: []engine.Watch{
			engine.OnInformer(claims, func(c engine.Change[*corev1.PersistentVolumeClaim]) []engine.Key {
				return keysOfClaim(c.New)
			}),
			engine.OnInformer(volumes, func(c engine.Change[*corev1.PersistentVolume]) []engine.Key {
				return []engine.Key{{Kind: volumeKey, Name: c.New.Name}}
			}),
			engine.OnInformer(classes, func(engine.Change[*storagev1.StorageClass]) []engine.Key { return unbound() }),
			engine.OnInformer(attributeClasses, func(engine.Change[*storagev1.VolumeAttributesClass]) []engine.Key {
				return unbound()
			}),
			engine.OnInformer(drivers, func(engine.Change[*storagev1.CSIDriver]) []engine.Key { return unbound() }),
			engine.OnInformer(csiNodes, func(c engine.Change[*storagev1.CSINode]) []engine.Key {
				if c.Type == engine.Deleted {
					return nil
				}
				return unbound()
			}),
			engine.OnInformer(nodes, func(c engine.Change[*corev1.Node]) []engine.Key {
				if c.Type != engine.Updated || maps.Equal(c.Old.Labels, c.New.Labels) {
					return nil
				}
				return unbound() // a node's labels determine its topology
			}),
			engine.OnInformer(capacities, func(engine.Change[*storagev1.CSIStorageCapacity]) []engine.Key {
				return nil
			}),
			engine.OnInformer(attachments, func(c engine.Change[*storagev1.VolumeAttachment]) []engine.Key {
				if from := c.New.Spec.Source.PersistentVolumeName; from != nil && c.Type == engine.Deleted {
					return []engine.Key{{Kind: volumeKey, Name: *from}}
				}
				return nil
			}),
		},
		Rules: []rbacv1.PolicyRule{
			{APIGroups: []string{""}, Resources: []string{"persistentvolumes"},
				Verbs: []string{"create", "delete", "get", "list", "update", "watch"}},
			{APIGroups: []string{""}, Resources: []string{"persistentvolumeclaims"},
				Verbs: []string{"get", "list", "update", "watch"}},
			{APIGroups: []string{""}, Resources: []string{"nodes"}, Verbs: []string{"get", "list", "watch"}},
			{APIGroups: []string{""}, Resources: []string{"secrets"}, Verbs: []string{"get"}},
			{APIGroups: []string{populatorGroup}, Resources: []string{"volumepopulators"}, Verbs: []string{"list"}},
			{APIGroups: []string{engine.SnapshotGroup},
				Resources: []string{"volumesnapshots", "volumesnapshotcontents"}, Verbs: []string{"get"}},
			{APIGroups: []string{"storage.k8s.io"},
				Resources: []string{"storageclasses", "csidrivers", "csinodes", "csistoragecapacities",
					"volumeattachments", "volumeattributesclasses"}, Verbs: []string{"get", "list", "watch"}},
			{APIGroups: []string{""}, Resources: []string{"events"}, Verbs: []string{"create", "patch", "update"}},
		},
		Lead: func(t *engine.Term) engine.Reconcile {
			p := &provisioner{term: t, calls: t.Drivers(calls), classes: classes, drivers: drivers, csiNodes: csiNodes,
				nodes: nodes, capacities: capacities, attachments: attachments, attributeClasses: attributeClasses,
				claimsCache: claims,
				claims:      engine.ViewOf[*corev1.PersistentVolumeClaim](t, claims),
				volumes:     engine.ViewOf[*corev1.PersistentVolume](t, volumes)}
			return p.reconcileKey
		},
	}
}

// provisioner reconciles claims and volumes during one term of leadership. Every term has a new
// provisioner.
type provisioner struct {
	term    *engine.Term
	calls   *engine.LeaderDrivers
	claims  *engine.View[*corev1.PersistentVolumeClaim]
	volumes *engine.View[*corev1.PersistentVolume]

	classes, drivers, csiNodes, nodes, capacities, attachments, attributeClasses, claimsCache cache.SharedIndexInformer
}

func (p *provisioner) reconcileKey(ctx context.Context, key engine.Key) (time.Duration, error) {
	if p.calls == nil {
		return 0, nil
	}
	var err error
	if key.Kind == claimKey {
		err = p.reconcileClaim(ctx, key)
	} else {
		err = p.reconcileVolume(ctx, key.Name)
	}
	if apierrors.IsConflict(err) || apierrors.IsNotFound(err) {
		err = engine.RaceError("%s: %w", key, err)
	}
	return 0, err
}

func (p *provisioner) isServed(driver string) bool {
	d, _ := engine.Cached[*storagev1.CSIDriver](p.drivers, "", driver)
	return engine.IsServedByAgent(d)
}

func (p *provisioner) reconcileClaim(ctx context.Context, key engine.Key) error {
	c, ok := p.claims.Get(key.Namespace, key.Name)
	if !ok {
		return nil
	}
	if err := p.unprotectSource(ctx, c); err != nil {
		return err
	}
	b, err := begunFor(c)
	if err != nil {
		return err
	}
	class, _ := engine.Cached[*storagev1.StorageClass](p.classes, "", volume.GetPersistentVolumeClaimClass(c))
	_, made := p.volumes.Get("", volumeName(c))
	if b == nil && !made && isPopulatedExternally(c) {
		return p.reportPopulator(ctx, c)
	}
	if b == nil && !made && c.Spec.VolumeName == "" && c.Spec.DataSource != nil && c.DeletionTimestamp == nil &&
		class != nil && p.isServed(class.Provisioner) &&
		waitsForConsumer(class) && c.Annotations[volume.AnnSelectedNode] == "" {
		o, err := p.findOrigin(ctx, c, class)
		if err != nil {
			return p.recordFailure(c, err)
		}
		_, err = p.recordReachableNodes(ctx, c, o)
		return err
	}
	switch planClaim(c, class, b != nil, made, class != nil && p.isServed(class.Provisioner)) {
	case startAction:
		return p.startProvision(ctx, c, class)
	case createAction:
		return p.createVolume(ctx, c, class, b)
	case undoAction:
		return p.undoProvision(ctx, c, b)
	case finishAction:
		return p.updateClaim(ctx, withoutProvisionNote(c, false))
	}
	return nil
}

// startProvision chooses a node for the volume of claim c, and stores the parameters of the driver
// call in the claim. The driver is called when the claim is reconciled again.
func (p *provisioner) startProvision(
	ctx context.Context, c *corev1.PersistentVolumeClaim, class *storagev1.StorageClass,
) error {
	if k := unknownParameter(class); k != "" {
		return p.recordFailure(c,
			fmt.Errorf("parameter %s of StorageClass %s is not served for drivers that the agents serve: leave it out",
				k, class.Name))
	}
	given, err := secretsOf(class.Parameters, c)
	if err != nil {
		return p.recordFailure(c, fmt.Errorf("StorageClass %q: %w", class.Name, err))
	}
	o, err := p.findOrigin(ctx, c, class)
	if err != nil {
		return p.recordFailure(c, err)
	}
	if done, err := p.recordReachableNodes(ctx, c, o); err != nil || !done {
		return err
	}
	nodes := p.candidateNodes(class)
	reach := slices.DeleteFunc(slices.Clone(nodes), func(n candidate) bool { return !o.isReachableFrom(n.node) })
	b, why := chooseNode(c, class, reach)
	if why != "" && len(reach) < len(nodes) {
		why = "the source of the volume is on other nodes: the claim's annotation " + engine.ReachedFromAnnotation +
			" of the claim lists them; " + why
	}
	b.Snapshot, b.Volume, b.Secrets = o.snapshot, o.volume, given
	if why != "" {
		if err := p.recordFailure(c, errors.New(why)); !waitsForConsumer(class) {
			return err
		}
		return p.updateClaim(ctx, withoutProvisionNote(c, true))
	}
	if err := p.addAttributes(ctx, c, &b); err != nil {
		return p.recordFailure(c, errors.New(engine.DriverErrorText(err)))
	}
	if err := p.protectSource(ctx, c); err != nil {
		return err
	}
	next, err := withProvisionNote(c, b)
	if err != nil {
		return err
	}
	return p.updateClaim(ctx, next)
}

// addAttributes adds the VolumeAttributesClass of claim c, and the parameters of that class, to b.
func (p *provisioner) addAttributes(ctx context.Context, c *corev1.PersistentVolumeClaim, b *startedProvision) error {
	if c.Spec.VolumeAttributesClassName == nil || *c.Spec.VolumeAttributesClassName == "" {
		return nil
	}
	name := *c.Spec.VolumeAttributesClassName
	class, ok := engine.Cached[*storagev1.VolumeAttributesClass](p.attributeClasses, "", name)
	switch {
	case !ok:
		return fmt.Errorf("VolumeAttributesClass %q does not exist: create it, or set another class in the claim", name)
	case class.DriverName != b.Driver:
		return engine.ClassDriverMismatch(class, b.Driver)
	}
	if err := engine.CheckModifyVolume(ctx, p.calls, b.Node, b.Driver); err != nil {
		return err
	}
	b.Class, b.Mutable = name, class.Parameters
	return nil
}

// candidateNodes returns the nodes that have registered the driver of a StorageClass.
func (p *provisioner) candidateNodes(class *storagev1.StorageClass) []candidate {
	rooms := engine.CachedAll[*storagev1.CSIStorageCapacity](p.capacities)
	var out []candidate
	for _, n := range engine.CachedAll[*storagev1.CSINode](p.csiNodes) {
		d := engine.FindNodeDriver(n, class.Provisioner)
		node, ok := engine.Cached[*corev1.Node](p.nodes, "", n.Name)
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

// currentSegments returns the current topology labels of the node of b, or nil if they are unknown.
func (p *provisioner) currentSegments(b *startedProvision) map[string]string {
	has, _ := engine.Cached[*storagev1.CSINode](p.csiNodes, "", b.Node)
	node, _ := engine.Cached[*corev1.Node](p.nodes, "", b.Node)
	if d := engine.FindNodeDriver(has, b.Driver); engine.MissingTopologyLabel(d, node) == "" {
		return engine.TopologySegments(d, node)
	}
	return nil
}

// callingNode returns the node through which the driver of b is called: the node that b names. For
// a driver without topology, every node reaches its volumes: if the node of b is not ready or was
// deleted, callingNode returns another ready node. ok is false if the node of b was deleted and no
// other node can be used.
func (p *provisioner) callingNode(b *startedProvision) (node string, ok bool) {
	n, ok := engine.Cached[*corev1.Node](p.nodes, "", b.Node)
	if ok && api.IsNodeReady(n) || len(b.Segments) > 0 {
		return b.Node, ok
	}
	var others []string
	for _, has := range engine.CachedAll[*storagev1.CSINode](p.csiNodes) {
		d := engine.FindNodeDriver(has, b.Driver)
		if o, there := engine.Cached[*corev1.Node](p.nodes, "", has.Name); there && api.IsNodeReady(o) && d != nil &&
			len(d.TopologyKeys) == 0 {
			others = append(others, has.Name)
		}
	}
	if len(others) == 0 {
		return b.Node, ok
	}
	return slices.Min(others), true
}

// createVolume calls CreateVolume with the parameters of b and creates the PersistentVolume for
// claim c. Every step may be repeated after an interruption. If the class has changed, it deletes
// the volume instead. If the node is full or was deleted, it removes or changes the choice of the
// node.
func (p *provisioner) createVolume(
	ctx context.Context, c *corev1.PersistentVolumeClaim, class *storagev1.StorageClass, b *startedProvision,
) error {
	if !b.matchesClass(class) {
		return p.undoProvision(ctx, c, b) // provisioning then starts again with the current class
	}
	node, ok := p.callingNode(b)
	if !ok {
		p.term.Events.Event(c, corev1.EventTypeWarning, "ProvisioningFailed",
			fmt.Sprintf("node %s, on which volume %s was being created, no longer exists", b.Node, volumeName(c)))
		return p.updateClaim(ctx, withoutProvisionNote(c, waitsForConsumer(class)))
	}
	if at := p.currentSegments(b); at != nil && !maps.Equal(at, b.Segments) {
		// the node's topology was unknown or different when provisioning started
		next := *b
		next.Segments = at
		moved, err := withProvisionNote(c, next)
		if err != nil {
			return err
		}
		return p.updateClaim(ctx, moved)
	}
	q := createRequest(c, b)
	var err error
	if q.Secrets, err = p.readSecret(ctx, b.Secrets[forProvisioning]); err != nil {
		return p.recordFailure(c, fmt.Errorf("StorageClass %q: %w", class.Name, err))
	}
	p.term.Events.Event(c, corev1.EventTypeNormal, "Provisioning",
		fmt.Sprintf("CSI driver %s on node %s is asked for a volume for claim \"%s/%s\"", b.Driver, node,
			c.Namespace, c.Name))
	res, err := engine.DriverController(p.calls, node, b.Driver).CreateVolume(ctx, q)
	switch {
	case err != nil && engine.IsDriverExhausted(err):
		err = p.recordFailure(c, fmt.Errorf("StorageClass %q: %s", class.Name, engine.DriverErrorText(err)))
		if waitsForConsumer(class) {
			return p.updateClaim(ctx, withoutProvisionNote(c, true)) // the scheduler chooses another node
		}
		if b.Snapshot != "" || b.Volume != "" {
			return err // only this node can reach the data source
		}
		next, why := chooseNode(c, class, p.candidateNodes(class))
		if why != "" || next.Node == b.Node {
			return err
		}
		next.Class, next.Mutable, next.Secrets = b.Class, b.Mutable, b.Secrets
		moved, invalid := withProvisionNote(c, next)
		if invalid != nil {
			return invalid
		}
		return p.updateClaim(ctx, moved)
	case err != nil:
		why := p.recordFailure(c, fmt.Errorf("StorageClass %q: node %s: %s", class.Name, node,
			engine.DriverErrorText(err)))
		if status.Code(err) == codes.NotFound && p.sourceGone(ctx, c) {
			// the clone source was deleted before it got cloningFinalizer
			return p.updateClaim(ctx, withoutProvisionNote(c, waitsForConsumer(class)))
		}
		return why
	case res.GetVolume().GetVolumeId() == "":
		return p.recordFailure(c, fmt.Errorf("StorageClass %q: CSI driver %s returned a volume without an ID",
			class.Name, b.Driver))
	}
	pv, err := client.Create(ctx, p.term.Client, volumeOf(c, class, b, res.GetVolume()))
	if apierrors.IsAlreadyExists(err) {
		pv, err = client.Get[*corev1.PersistentVolume](ctx, p.term.Client, "", volumeName(c))
	}
	if err != nil {
		return p.recordFailure(c, fmt.Errorf("creating PersistentVolume %s: %w", volumeName(c), err))
	}
	p.volumes.RecordWrite(pv)
	p.term.Events.Event(c, corev1.EventTypeNormal, "ProvisioningSucceeded", "Successfully provisioned volume "+pv.Name)
	return p.updateClaim(ctx, withoutProvisionNote(c, false))
}

// undoProvision makes the driver delete the volume that it may have created for claim c, which no
// longer needs the volume. It first repeats CreateVolume, because only the response contains the
// volume's ID.
func (p *provisioner) undoProvision(ctx context.Context, c *corev1.PersistentVolumeClaim, b *startedProvision) error {
	pv, err := client.Get[*corev1.PersistentVolume](ctx, p.term.Client, "", volumeName(c))
	if err == nil { // the PersistentVolume was created after all; the volume binder releases it
		p.volumes.RecordWrite(pv)
		return p.updateClaim(ctx, withoutProvisionNote(c, false))
	}
	if !apierrors.IsNotFound(err) {
		return err
	}
	node, ok := p.callingNode(b)
	if !ok {
		return p.updateClaim(ctx, withoutProvisionNote(c, false)) // the node was deleted, and with it the volume
	}
	q := createRequest(c, b)
	if q.Secrets, err = p.readDeletionSecret(ctx, b.Secrets[forProvisioning]); err != nil {
		return p.recordFailure(c, err)
	}
	driver := engine.DriverController(p.calls, node, b.Driver)
	res, err := driver.CreateVolume(ctx, q)
	if err == nil {
		_, err = driver.DeleteVolume(ctx, &csi.DeleteVolumeRequest{VolumeId: res.GetVolume().GetVolumeId(),
			Secrets: q.Secrets})
		if err != nil {
			return p.recordFailure(c, fmt.Errorf("the partly created volume cannot be deleted: %s",
				engine.DriverErrorText(err)))
		}
	} else if !engine.IsCallWithoutEffect(err) {
		return p.recordFailure(c,
			fmt.Errorf("it is not known whether CSI driver %s on node %s has started to create a volume: %s", b.Driver,
				node, engine.DriverErrorText(err)))
	}
	return p.updateClaim(ctx, withoutProvisionNote(c, false))
}

// recordFailure records a Warning event of claim c about the failed provisioning, and returns err.
func (p *provisioner) recordFailure(c *corev1.PersistentVolumeClaim, err error) error {
	p.term.Events.Event(c, corev1.EventTypeWarning, "ProvisioningFailed", "failed to provision volume: "+err.Error())
	return fmt.Errorf("volume of claim %s/%s: %w", c.Namespace, c.Name, err)
}

func (p *provisioner) reconcileVolume(ctx context.Context, name string) error {
	v, ok := p.volumes.Get("", name)
	if !ok || v.Spec.CSI == nil || !p.isServed(v.Spec.CSI.Driver) || planVolume(v) == leaveVolume {
		return nil
	}
	// Read the object from the API: a cached object must not cause the deletion of data.
	v, err := client.Get[*corev1.PersistentVolume](ctx, p.term.Client, "", name)
	if err != nil {
		return err
	}
	what := planVolume(v)
	if what == leaveVolume {
		return nil
	}
	if what == deleteData {
		gone, err := p.deleteVolume(ctx, v)
		if err != nil {
			p.term.Events.Event(v, corev1.EventTypeWarning, "VolumeFailedDelete", engine.DriverErrorText(err))
			return fmt.Errorf("deleting volume %s: %w", v.Name, err)
		}
		if !gone {
			return nil
		}
	}
	if v.DeletionTimestamp == nil {
		err := client.Delete[*corev1.PersistentVolume](ctx, p.term.Client, "", v.Name,
			metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: &v.UID}})
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
	p.volumes.RecordWrite(next)
	return nil
}

// deleteVolume calls DeleteVolume for PersistentVolume v. gone reports that the data no longer
// exist. It is false while the volume is attached to a node. If no node can reach the volume any
// more, gone is true only if a user has deleted v.
func (p *provisioner) deleteVolume(ctx context.Context, v *corev1.PersistentVolume) (gone bool, err error) {
	if len(engine.CachedBy[*storagev1.VolumeAttachment](p.attachments, ofVolume, v.Name)) > 0 {
		return false, nil
	}
	node, err := engine.FirstReachingNode(v, p.csiNodes, p.nodes)
	switch {
	case errors.Is(err, engine.ErrNoNode) && v.DeletionTimestamp != nil:
		return true, nil
	case errors.Is(err, engine.ErrNoNode):
		p.term.Events.Event(v, corev1.EventTypeWarning, "VolumeFailedDelete",
			"the node that has the volume is no longer part of the cluster: delete this object (kubectl delete pv "+
				v.Name+") to remove it from the cluster")
		return false, nil
	case err != nil:
		return false, err
	}
	q := &csi.DeleteVolumeRequest{VolumeId: v.Spec.CSI.VolumeHandle}
	if q.Secrets, err = p.readDeletionSecret(ctx, deletionSecret(v)); err != nil {
		return false, err
	}
	_, err = engine.DriverController(p.calls, node, v.Spec.CSI.Driver).DeleteVolume(ctx, q)
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
	p.claims.RecordWrite(next)
	p.term.Enqueue(engine.Key{Kind: claimKey, Namespace: c.Namespace, Name: c.Name})
	return nil
}
