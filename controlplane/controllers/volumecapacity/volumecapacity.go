// Package volumecapacity maintains CSIStorageCapacity objects for drivers that the agents serve
// (engine.IsServedByAgent). Each object holds the capacity for new volumes of a StorageClass
// on a node. The scheduler uses the objects.
package volumecapacity

import (
	"context"
	"fmt"
	"hash/fnv"
	"maps"
	"math/bits"
	"strings"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/controllers/engine"
)

// Namespace is the namespace of the CSIStorageCapacity objects.
const Namespace = metav1.NamespaceSystem

// nodeLabel is a label with the node of a CSIStorageCapacity. managedLabel with value manager marks
// the objects of this controller.
const (
	nodeLabel    = "keelson.dev/node"
	managedLabel = "csi.storage.k8s.io/managed-by"
	manager      = "keelson"
)

// minQueryInterval is the minimum interval between two queries of the capacity of a node. With many
// nodes the interval is longer, so that the cluster makes at most 20 queries per second.
const minQueryInterval = time.Minute

// New returns the controller of CSIStorageCapacity objects. calls is the client with which CSI
// drivers are called through the agents of the nodes. If calls is nil, the controller calls no
// driver.
func New(d engine.Deps, calls api.NodeDrivers) *engine.Descriptor {
	i := d.Informers
	nodes, csiNodes := client.Informer[*corev1.Node](i), client.Informer[*storagev1.CSINode](i)
	classes, drivers := client.Informer[*storagev1.StorageClass](i), client.Informer[*storagev1.CSIDriver](i)
	objects, volumes := client.Informer[*storagev1.CSIStorageCapacity](i), client.Informer[*corev1.PersistentVolume](i)
	every := func() []engine.Key {
		var keys []engine.Key
		for _, n := range engine.CachedAll[*storagev1.CSINode](csiNodes) {
			keys = append(keys, engine.Key{Name: n.Name})
		}
		return keys
	}
	return &engine.Descriptor{
		Name:    "volume-capacity",
		Workers: 4,
		Watches: []engine.Watch{
			engine.OnInformer(csiNodes, engine.Self[*storagev1.CSINode]),
			engine.OnInformer(nodes, func(c engine.Change[*corev1.Node]) []engine.Key {
				if c.Type != engine.Updated || maps.Equal(c.Old.Labels, c.New.Labels) {
					return nil
				}
				return []engine.Key{{Name: c.New.Name}}
			}),
			engine.OnInformer(classes, func(engine.Change[*storagev1.StorageClass]) []engine.Key { return every() }),
			engine.OnInformer(drivers, func(engine.Change[*storagev1.CSIDriver]) []engine.Key { return every() }),
			engine.OnInformer(objects, func(c engine.Change[*storagev1.CSIStorageCapacity]) []engine.Key {
				if name := c.New.Labels[nodeLabel]; name != "" && c.Type != engine.Updated {
					return []engine.Key{{Name: name}}
				}
				return nil
			}),
			// Creating or deleting a volume changes the capacity.
			engine.OnInformer(volumes, func(c engine.Change[*corev1.PersistentVolume]) []engine.Key {
				if c.Type == engine.Updated || c.New.Spec.CSI == nil {
					return nil
				}
				return onNodes(c.New)
			}),
		},
		Rules: []rbacv1.PolicyRule{
			{APIGroups: []string{"storage.k8s.io"}, Resources: []string{"csistoragecapacities"},
				Verbs: []string{"create", "delete", "get", "list", "update", "watch"}},
			{APIGroups: []string{"storage.k8s.io"}, Resources: []string{"storageclasses", "csidrivers", "csinodes"},
				Verbs: []string{"get", "list", "watch"}},
			{APIGroups: []string{""}, Resources: []string{"nodes", "persistentvolumes"},
				Verbs: []string{"get", "list", "watch"}},
		},
		Lead: func(t *engine.Term) engine.Reconcile {
			k := &keeper{term: t, calls: t.Drivers(calls)}
			k.list = func(node string) (
				*storagev1.CSINode, *corev1.Node, []*storagev1.StorageClass, []*storagev1.CSIStorageCapacity,
			) {
				c, _ := engine.Cached[*storagev1.CSINode](csiNodes, "", node)
				n, _ := engine.Cached[*corev1.Node](nodes, "", node)
				return c, n, engine.CachedAll[*storagev1.StorageClass](classes),
					engine.CachedAll[*storagev1.CSIStorageCapacity](objects)
			}
			k.wanted = func(driver string) bool {
				d, _ := engine.Cached[*storagev1.CSIDriver](drivers, "", driver)
				return engine.IsServedByAgent(d) && d.Spec.StorageCapacity != nil && *d.Spec.StorageCapacity
			}
			k.period = func() time.Duration { return max(minQueryInterval, time.Duration(len(every()))*time.Second/20) }
			return k.reconcileNode
		},
	}
}

// onNodes returns the keys of the nodes that the node affinity of volume v names. It returns all
// values in the affinity, because the value of a topology label usually is the name of a node.
func onNodes(v *corev1.PersistentVolume) []engine.Key {
	var keys []engine.Key
	if v.Spec.NodeAffinity == nil || v.Spec.NodeAffinity.Required == nil {
		return nil
	}
	for _, t := range v.Spec.NodeAffinity.Required.NodeSelectorTerms {
		for _, e := range t.MatchExpressions {
			for _, value := range e.Values {
				keys = append(keys, engine.Key{Name: value})
			}
		}
	}
	return keys
}

// keeper reconciles the capacity of nodes during one term of leadership. Every term has a new
// keeper.
type keeper struct {
	term  *engine.Term
	calls *engine.LeaderDrivers
	list  func(node string) (*storagev1.CSINode, *corev1.Node, []*storagev1.StorageClass,
		[]*storagev1.CSIStorageCapacity)
	wanted func(driver string) bool
	period func() time.Duration
}

func (k *keeper) reconcileNode(ctx context.Context, key engine.Key) (time.Duration, error) {
	if k.calls == nil {
		return 0, nil
	}
	csiNode, node, classes, have := k.list(key.Name)
	want := map[string]*storagev1.CSIStorageCapacity{}
	var failed error
	asks := false
	for _, class := range classes {
		d := engine.FindNodeDriver(csiNode, class.Provisioner)
		if d == nil || node == nil || len(d.TopologyKeys) == 0 || engine.MissingTopologyLabel(d, node) != "" ||
			!k.wanted(class.Provisioner) {
			continue
		}
		asks = true
		o, err := k.getCapacity(ctx, node, d, class)
		if err != nil {
			failed = fmt.Errorf("capacity for volumes of StorageClass %s on node %s: %w", class.Name, node.Name, err)
			o = nil // keep the stored capacity until the node responds
		}
		want[capacityName(node.Name, class.Name)] = o
	}
	for _, o := range have {
		if o.Namespace != Namespace || o.Labels[nodeLabel] != key.Name || o.Labels[managedLabel] != manager {
			continue
		}
		next, ok := want[o.Name]
		delete(want, o.Name)
		var err error
		switch {
		case !ok:
			err = client.Delete[*storagev1.CSIStorageCapacity](ctx, k.term.Client, o.Namespace, o.Name,
				metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: &o.UID}})
		case next != nil && !equality.Semantic.DeepEqual(o.NodeTopology, next.NodeTopology):
			// the field is immutable: recreate the object
			if err = client.Delete[*storagev1.CSIStorageCapacity](ctx, k.term.Client, o.Namespace, o.Name,
				metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: &o.UID}}); err == nil {
				want[o.Name] = next
			}
		case next != nil && !isSameCapacity(o, next):
			up := o.DeepCopy()
			up.Capacity, up.MaximumVolumeSize = next.Capacity, next.MaximumVolumeSize
			delete(up.Annotations, api.NoRoomAnnotation)
			for k, v := range next.Annotations {
				metav1.SetMetaDataAnnotation(&up.ObjectMeta, k, v)
			}
			_, err = client.Update(ctx, k.term.Client, up)
		}
		if err != nil && !apierrors.IsNotFound(err) {
			return 0, err
		}
	}
	for _, o := range want {
		if o == nil {
			continue
		}
		if _, err := client.Create(ctx, k.term.Client, o); err != nil && !apierrors.IsAlreadyExists(err) {
			return 0, err
		}
	}
	if failed != nil || !asks {
		return 0, failed
	}
	return k.period(), nil
}

func isSameCapacity(a, b *storagev1.CSIStorageCapacity) bool {
	return equality.Semantic.DeepEqual(a.Capacity, b.Capacity) &&
		equality.Semantic.DeepEqual(a.MaximumVolumeSize, b.MaximumVolumeSize) &&
		a.Annotations[api.NoRoomAnnotation] == b.Annotations[api.NoRoomAnnotation]
}

// reserved is the prefix of StorageClass parameters that are not passed to drivers.
const reserved = "csi.storage.k8s.io/"

// longestReason is the maximum length, in bytes, to which a driver's message is shortened when it
// is stored.
const longestReason = 512

// getCapacity returns the CSIStorageCapacity for a class on a node, from a GetCapacity call of
// driver d. If the driver returns FailedPrecondition, it can create no volume there: the capacity
// is then 0, and an annotation contains the reason.
func (k *keeper) getCapacity(
	ctx context.Context, node *corev1.Node, d *storagev1.CSINodeDriver, class *storagev1.StorageClass,
) (*storagev1.CSIStorageCapacity, error) {
	segments := engine.TopologySegments(d, node)
	params := maps.Clone(class.Parameters)
	maps.DeleteFunc(params, func(k, _ string) bool { return strings.HasPrefix(k, reserved) })
	var why map[string]string
	res, err := engine.DriverController(k.calls, node.Name, d.Name).GetCapacity(ctx, &csi.GetCapacityRequest{
		Parameters: params, AccessibleTopology: &csi.Topology{Segments: segments}})
	switch {
	case status.Code(err) == codes.FailedPrecondition:
		text := status.Convert(err).Message()
		res, why = &csi.GetCapacityResponse{},
			map[string]string{api.NoRoomAnnotation: strings.ToValidUTF8(text[:min(len(text), longestReason)], "")}
	case err != nil:
		return nil, err
	}
	o := &storagev1.CSIStorageCapacity{
		ObjectMeta: metav1.ObjectMeta{Namespace: Namespace, Name: capacityName(node.Name, class.Name), Annotations: why,
			Labels: map[string]string{managedLabel: manager, nodeLabel: node.Name,
				"csi.storage.k8s.io/drivername": d.Name},
			OwnerReferences: []metav1.OwnerReference{{APIVersion: "v1", Kind: "Node", Name: node.Name, UID: node.UID}}},
		NodeTopology: &metav1.LabelSelector{MatchLabels: segments}, StorageClassName: class.Name,
		Capacity: roundedQuantity(res.GetAvailableCapacity()),
	}
	if most := res.GetMaximumVolumeSize(); most != nil {
		o.MaximumVolumeSize = roundedQuantity(most.GetValue())
	}
	return o, nil
}

// capacityName returns the name of the CSIStorageCapacity for a class on a node.
func capacityName(node, class string) string {
	h := fnv.New64a()
	fmt.Fprintf(h, "%s\x00%s", node, class)
	return fmt.Sprintf("csisc-%016x", h.Sum64())
}

// roundedQuantity returns n rounded down to its six most significant bits. Free space changes all
// the time, and small changes do not affect scheduling.
func roundedQuantity(n int64) *resource.Quantity {
	if n < 0 {
		n = 0
	}
	if drop := bits.Len64(uint64(n)) - 6; drop > 0 {
		n = n >> drop << drop
	}
	return resource.NewQuantity(n, resource.BinarySI)
}
