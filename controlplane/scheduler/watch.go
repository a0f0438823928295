package scheduler

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"runtime/debug"
	"slices"
	"sync"

	appsv1 "k8s.io/api/apps/v1"
	v1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	resourcev1 "k8s.io/api/resource/v1"
	schedulingv1beta1 "k8s.io/api/scheduling/v1beta1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/client-go/tools/cache"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/scheduler/framework"
)

// changeHandler applies changes of objects that the informers report, one at a time. It updates the
// queue, the cluster state and the PodGroups' counts.
type changeHandler struct {
	log       *slog.Logger
	informers *client.Informers
	profiles  *profiles
	cluster   *cluster
	queue     *queue
	groups    *groupTracker
	waiting   *waitingPods
	access    *clusterAccess
	mu        sync.Mutex // held while one change is applied
}

// registerHandlers registers the handlers with which changeHandler receives changes from the
// informers.
func (h *changeHandler) registerHandlers() {
	addHandler[*v1.Pod](h, h.podChanged)
	addHandler[*v1.Node](h, h.nodeChanged)
	addHandler[*v1.Namespace](h, h.namespaceChanged)
	addHandler[*v1.Service](h, h.serviceChanged)
	addHandler[*schedulingv1beta1.PodGroup](h, h.groupChanged)
	// Changes of these objects need no handler: plugins only look up the objects.
	client.Informer[*v1.ReplicationController](h.informers)
	client.Informer[*appsv1.ReplicaSet](h.informers)
	client.Informer[*appsv1.StatefulSet](h.informers)
	client.Informer[*policyv1.PodDisruptionBudget](h.informers)
	addHandler[*v1.PersistentVolumeClaim](h, func(old, now *v1.PersistentVolumeClaim) {
		h.storageChanged(framework.ClaimChanged, currentOrOld(old, now))
	})
	addHandler[*v1.PersistentVolume](h, func(old, now *v1.PersistentVolume) {
		h.storageChanged(framework.VolumeChanged, currentOrOld(old, now))
	})
	addHandler[*storagev1.CSINode](h, func(old, now *storagev1.CSINode) {
		h.queue.handleEvent(context.Background(), framework.DriversChanged, currentOrOld(old, now))
	})
	addHandler[*storagev1.StorageClass](h, func(old, now *storagev1.StorageClass) {
		h.storageChanged(framework.StorageClassChange, currentOrOld(old, now))
	})
	addHandler[*storagev1.CSIDriver](h, func(old, now *storagev1.CSIDriver) {
		h.storageChanged(framework.StorageClassChange, currentOrOld(old, now))
	})
	addHandler[*storagev1.CSIStorageCapacity](h, func(old, now *storagev1.CSIStorageCapacity) {
		h.storageChanged(framework.StorageClassChange, currentOrOld(old, now))
	})
	addHandler[*resourcev1.ResourceClaim](h, h.deviceClaimChanged)
	addHandler[*resourcev1.ResourceSlice](h, func(old, now *resourcev1.ResourceSlice) {
		h.queue.handleEvent(context.Background(), framework.SliceChanged, currentOrOld(old, now))
	})
	addHandler[*resourcev1.DeviceClass](h, func(old, now *resourcev1.DeviceClass) {
		h.queue.handleEvent(context.Background(), framework.DeviceClassChanged, currentOrOld(old, now))
	})
}

func (h *changeHandler) deviceClaimChanged(old, now *resourcev1.ResourceClaim) {
	h.observeClaim(currentOrOld(old, now), now == nil)
	h.access.devices.wakeAll()
	h.queue.handleEvent(context.Background(), framework.DeviceClaimChanged, currentOrOld(old, now))
}

// observeClaim records in the Ledger of the plugin DynamicResources which devices the ResourceClaim
// has. gone means that the claim was deleted.
func (h *changeHandler) observeClaim(c *resourcev1.ResourceClaim, gone bool) {
	if shared := h.profiles.shared; shared != nil {
		shared.Ledger.Observe(c, gone)
	}
}

// addHandler registers f as the handler of all changes of objects of type T. For an added object, f
// is called with old = nil; for a deleted object, with now = nil.
func addHandler[T interface {
	api.Object
	comparable
}](h *changeHandler, f func(old, now T)) {
	var none T
	_, err := client.Informer[T](h.informers).AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc: func(o any) {
			if t, ok := o.(T); ok {
				h.applyChange(func() { f(none, t) })
			}
		},
		UpdateFunc: func(old, o any) {
			a, _ := old.(T)
			if b, ok := o.(T); ok {
				h.applyChange(func() { f(a, b) })
			}
		},
		DeleteFunc: func(o any) {
			if d, ok := o.(cache.DeletedFinalStateUnknown); ok {
				o = d.Obj
			}
			if t, ok := o.(T); ok {
				h.applyChange(func() { f(t, none) })
			}
		},
	})
	if err != nil {
		panic(fmt.Sprintf("scheduler: watch %T: %v", none, err)) // cannot fail: the informer has not started
	}
}

// applyChange calls change, a function that applies one change from an informer. Only one such
// function runs at a time. If it panics, the panic is logged and the rest of the change is dropped.
func (h *changeHandler) applyChange(change func()) {
	h.mu.Lock()
	defer h.mu.Unlock()
	defer func() {
		if p := recover(); p != nil {
			h.log.Error("panic while handling a change", "panic", p, "stack", string(debug.Stack()))
		}
	}()
	change()
}

// currentOrOld returns now, the current version of an object, or old if the object was deleted and
// now is nil.
func currentOrOld[T comparable](old, now T) T {
	var none T
	if now != none {
		return now
	}
	return old
}

// podChanged handles a change of a pod from old to now. It updates the counts of the pod's
// PodGroup, the queue and the cluster state, and sends an event to the queue if the change may help
// unschedulable pods. old is nil for a new pod, and now is nil for a deleted one.
func (h *changeHandler) podChanged(old, now *v1.Pod) {
	ctx := context.Background() // for PreEnqueue plugins; nothing here blocks
	if pod := currentOrOld(old, now); h.groups.observePod(pod,
		now == nil || api.IsPodTerminal(pod) || pod.DeletionTimestamp != nil) {
		key, _ := framework.GroupOf(pod)
		defer h.queue.handleEvent(ctx, framework.GroupChanged, key)
	}
	switch {
	case now == nil:
		h.queue.removePod(old.UID)
		h.waiting.rejectWaiting(old.UID, "the pod was deleted")
		if h.cluster.removePod(old.UID) {
			h.queue.handleEvent(ctx, framework.PodRemoved, old)
		}
	case api.IsPodTerminal(now):
		h.queue.removePod(now.UID)
		if h.cluster.removePod(now.UID) {
			h.queue.handleEvent(ctx, framework.PodRemoved, now)
		}
	case now.Spec.NodeName != "":
		if old != nil && old.Spec.NodeName != "" && sameForScheduling(old, now) {
			if h.cluster.isPlaced(now.UID) {
				return // usually only the status changed
			}
		}
		h.cluster.addBoundPod(now)
		h.queue.removePod(now.UID)
		if old != nil && old.Spec.NodeName != "" {
			h.queue.handleEvent(ctx, framework.PodUpdated, framework.PodUpdate{Old: old, Now: now})
		} else {
			h.queue.handleEvent(ctx, framework.PodAdded, now)
		}
	case h.profiles.forPod(now) == nil, now.DeletionTimestamp != nil:
		h.queue.removePod(now.UID)
		h.waiting.rejectWaiting(now.UID, "the pod is being deleted")
		h.cluster.nominateNode(framework.NewPodInfo(now), "")
	default:
		was := ""
		if old != nil {
			was = old.Status.NominatedNodeName
		}
		if node := now.Status.NominatedNodeName; node != was {
			h.cluster.nominateNode(framework.NewPodInfo(now), node)
		}
		h.queue.addOrUpdate(ctx, now)
	}
}

func (h *changeHandler) nodeChanged(old, now *v1.Node) {
	if now == nil {
		h.cluster.removeNode(old.Name)
		return
	}
	ctx := context.Background()
	if old == nil {
		h.cluster.setNode(now)
		h.queue.handleEvent(ctx, framework.NodeAdded, now)
		return
	}
	allocatable := !equality.Semantic.DeepEqual(old.Status.Allocatable, now.Status.Allocatable)
	labelsChanged := !maps.Equal(old.Labels, now.Labels)
	taints := old.Spec.Unschedulable != now.Spec.Unschedulable ||
		!equality.Semantic.DeepEqual(old.Spec.Taints, now.Spec.Taints)
	features := !slices.Equal(old.Status.DeclaredFeatures, now.Status.DeclaredFeatures)
	images := len(old.Status.Images) != len(now.Status.Images)
	if !allocatable && !labelsChanged && !taints && !features && !images {
		return // only conditions and similar fields changed, which no plugin uses
	}
	h.cluster.setNode(now)
	for _, e := range []struct {
		is    bool
		event framework.Event
	}{{allocatable, framework.NodeAllocatable}, {labelsChanged, framework.NodeLabels}, {taints, framework.NodeTaints},
		{features, framework.NodeFeatures}} {
		if e.is {
			h.queue.handleEvent(ctx, e.event, now)
		}
	}
}

// namespaceChanged handles a change of a namespace from old to now: it updates the labels in the
// cluster state, which the namespace selectors of affinity terms match, and sends the event
// NamespaceLabels to the queue.
func (h *changeHandler) namespaceChanged(old, now *v1.Namespace) {
	if now == nil {
		h.cluster.removeNamespace(old.Name)
		return
	}
	if old != nil && maps.Equal(old.Labels, now.Labels) {
		return
	}
	h.cluster.setNamespace(now.Name, now.Labels)
	h.queue.handleEvent(context.Background(), framework.NamespaceLabels, now)
}

func (h *changeHandler) serviceChanged(old, now *v1.Service) {
	if now == nil {
		h.cluster.setService(old.Namespace, old.Name, nil)
		return
	}
	h.cluster.setService(now.Namespace, now.Name, now.Spec.Selector)
}

// clusterAccess provides the functions of framework.Handle that look up objects in the informers
// and write ResourceClaims. It wakes PreBind plugins that wait for a change of a storage object or
// a ResourceClaim.
type clusterAccess struct {
	informers *client.Informers
	lead      *leadership
	volumes   *broadcast
	devices   *broadcast
}

// ownerSelector returns the pod selector of the ReplicationController, ReplicaSet or StatefulSet to
// which ref refers. It returns nil for another kind, or if the informer does not have the object.
func (a *clusterAccess) ownerSelector(namespace string, ref *metav1.OwnerReference) labels.Selector {
	i := a.informers
	var selector *metav1.LabelSelector
	switch ref.APIVersion + " " + ref.Kind {
	case "v1 ReplicationController":
		if o, ok := client.Cached[*v1.ReplicationController](i, namespace, ref.Name); ok {
			return labels.SelectorFromSet(o.Spec.Selector)
		}
	case "apps/v1 ReplicaSet":
		if o, ok := client.Cached[*appsv1.ReplicaSet](i, namespace, ref.Name); ok {
			selector = o.Spec.Selector
		}
	case "apps/v1 StatefulSet":
		if o, ok := client.Cached[*appsv1.StatefulSet](i, namespace, ref.Name); ok {
			selector = o.Spec.Selector
		}
	}
	if selector == nil {
		return nil
	}
	sel, err := metav1.LabelSelectorAsSelector(selector)
	if err != nil {
		return nil
	}
	return sel
}

func (h *changeHandler) storageChanged(e framework.Event, obj any) {
	h.access.volumes.wakeAll()
	h.queue.handleEvent(context.Background(), e, obj)
}

func volumeLimits(n *storagev1.CSINode) map[string]int32 {
	out := make(map[string]int32)
	for _, d := range n.Spec.Drivers {
		if d.Allocatable != nil && d.Allocatable.Count != nil {
			out[d.Name] = *d.Allocatable.Count
		}
	}
	return out
}

// syncFromInformers updates the queue, the cluster state and the Ledger of DynamicResources to the
// current content of the informers' stores, which may be newer than the changes that the handlers
// have received.
func (h *changeHandler) syncFromInformers(ctx context.Context) {
	for _, ns := range client.CachedList[*v1.Namespace](h.informers, "", nil) {
		h.applyChange(func() {
			if now, ok := client.Cached[*v1.Namespace](h.informers, "", ns.Name); ok {
				h.cluster.setNamespace(now.Name, now.Labels)
			}
		})
	}
	for _, c := range client.CachedList[*resourcev1.ResourceClaim](h.informers, "", nil) {
		h.applyChange(func() {
			if now, ok := client.Cached[*resourcev1.ResourceClaim](h.informers, c.Namespace, c.Name); ok {
				h.observeClaim(now, false)
			}
		})
	}
	h.syncNodes(client.CachedList[*v1.Node](h.informers, "", nil))
	h.syncPods(ctx, client.CachedList[*v1.Pod](h.informers, "", nil))
}

// syncNodes updates the cluster state to the versions of the given nodes in the informer's store.
// It skips a node that is no longer in the store: its deletion may have been handled already, so
// nothing would remove the node again.
func (h *changeHandler) syncNodes(nodes []*v1.Node) {
	for _, n := range nodes {
		h.applyChange(func() {
			if now, ok := client.Cached[*v1.Node](h.informers, "", n.Name); ok {
				h.cluster.setNode(now)
			}
		})
	}
}

// syncPods updates the queue and the cluster state to the versions of the given pods in the
// informer's store. It skips a pod that is no longer in the store: its deletion may have been
// handled already, so nothing would remove the pod again.
func (h *changeHandler) syncPods(ctx context.Context, pods []*v1.Pod) {
	for _, pod := range pods {
		if ctx.Err() != nil {
			return
		}
		h.applyChange(func() {
			if now, ok := client.Cached[*v1.Pod](h.informers, pod.Namespace, pod.Name); ok {
				h.podChanged(nil, now)
			}
		})
	}
}

// newHandle returns a Handle for the plugins of one profile. The caller must set the fields Fits
// and Extenders, which depend on the profile.
func (s *Scheduler) newHandle() *framework.Handle {
	i := s.cfg.Informers
	volumes := s.access.storageAccess()
	volumes.ObserveOperation = s.metrics.observeVolumes
	h := &framework.Handle{
		Volumes: volumes,
		Devices: s.access.deviceAccess(),
		Budgets: func() []*policyv1.PodDisruptionBudget {
			return client.CachedList[*policyv1.PodDisruptionBudget](i, "", nil)
		},
		Pod:   func(namespace, name string) (*v1.Pod, bool) { return client.Cached[*v1.Pod](i, namespace, name) },
		Group: s.lookUpGroup,
		VolumeLimits: func(node string) map[string]int32 {
			n, ok := client.Cached[*storagev1.CSINode](i, "", node)
			if !ok {
				return nil
			}
			return volumeLimits(n)
		},
		Preempt:  s.evictions.preemptPods,
		Nominate: s.evictions.nominatePod,
		Bind:     s.lead.postBinding,
		UpdateClaim: func(ctx context.Context, c *v1.PersistentVolumeClaim) (*v1.PersistentVolumeClaim, error) {
			return client.Update(ctx, s.lead.writer.Load(), c)
		},
		UpdateVolume: func(ctx context.Context, v *v1.PersistentVolume) (*v1.PersistentVolume, error) {
			return client.Update(ctx, s.lead.writer.Load(), v)
		},
		AwaitVolumes: s.access.volumes.awaitChange,
		Waiting:      s.binding.waiting.waitingPod,
	}
	return h
}

// storageAccess returns functions that look up storage objects in the informers. registerHandlers
// must have been called.
func (a *clusterAccess) storageAccess() framework.Volumes {
	i := a.informers
	return framework.Volumes{
		Claim: func(namespace, name string) (*v1.PersistentVolumeClaim, bool) {
			return client.Cached[*v1.PersistentVolumeClaim](i, namespace, name)
		},
		PersistentVolume: func(name string) (*v1.PersistentVolume, bool) {
			return client.Cached[*v1.PersistentVolume](i, "", name)
		},
		PersistentVolumes: func() []*v1.PersistentVolume { return client.CachedList[*v1.PersistentVolume](i, "", nil) },
		StorageClass: func(name string) (*storagev1.StorageClass, bool) {
			return client.Cached[*storagev1.StorageClass](i, "", name)
		},
		PublishesCapacity: func(driver string) bool {
			d, ok := client.Cached[*storagev1.CSIDriver](i, "", driver)
			return ok && d.Spec.StorageCapacity != nil && *d.Spec.StorageCapacity
		},
		StorageCapacities: func(class string) []*storagev1.CSIStorageCapacity {
			return slices.DeleteFunc(client.CachedList[*storagev1.CSIStorageCapacity](i, "", nil),
				func(c *storagev1.CSIStorageCapacity) bool { return c.StorageClassName != class })
		},
	}
}

// deviceAccess returns functions that look up devices and ResourceClaims in the informers, and
// write ResourceClaims through the API.
func (a *clusterAccess) deviceAccess() framework.Devices {
	i := a.informers
	return framework.Devices{
		DeviceClaim: func(namespace, name string) (*resourcev1.ResourceClaim, bool) {
			return client.Cached[*resourcev1.ResourceClaim](i, namespace, name)
		},
		DeviceClass: func(name string) (*resourcev1.DeviceClass, bool) {
			return client.Cached[*resourcev1.DeviceClass](i, "", name)
		},
		DeviceClasses: func() []*resourcev1.DeviceClass {
			return client.CachedList[*resourcev1.DeviceClass](i, "", nil)
		},
		Slices: func() []*resourcev1.ResourceSlice {
			return client.CachedList[*resourcev1.ResourceSlice](i, "", nil)
		},
		DeviceClaimNow: func(ctx context.Context, namespace, name string) (*resourcev1.ResourceClaim, error) {
			return client.Get[*resourcev1.ResourceClaim](ctx, a.lead.writer.Load(), namespace, name)
		},
		UpdateDeviceClaim: func(ctx context.Context, c *resourcev1.ResourceClaim) (*resourcev1.ResourceClaim, error) {
			return client.Update(ctx, a.lead.writer.Load(), c)
		},
		UpdateDeviceClaimStatus: func(ctx context.Context,
			c *resourcev1.ResourceClaim) (*resourcev1.ResourceClaim, error) {
			return client.UpdateStatus(ctx, a.lead.writer.Load(), c)
		},
		AwaitDevices: a.devices.awaitChange,
	}
}
