package scheduler

import (
	"context"
	"fmt"
	"maps"
	"runtime/debug"
	"slices"

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

// registerHandlers registers the informer handlers that keep the queue and the cluster state up to
// date.
func (s *Scheduler) registerHandlers() {
	addHandler[*v1.Pod](s, s.podChanged)
	addHandler[*v1.Node](s, s.nodeChanged)
	addHandler[*v1.Namespace](s, s.namespaceChanged)
	addHandler[*v1.Service](s, s.serviceChanged)
	addHandler[*schedulingv1beta1.PodGroup](s, s.groupChanged)
	// These objects are only looked up.
	client.Informer[*v1.ReplicationController](s.cfg.Informers)
	client.Informer[*appsv1.ReplicaSet](s.cfg.Informers)
	client.Informer[*appsv1.StatefulSet](s.cfg.Informers)
	client.Informer[*policyv1.PodDisruptionBudget](s.cfg.Informers)
	addHandler[*v1.PersistentVolumeClaim](s, func(old, now *v1.PersistentVolumeClaim) {
		s.storageChanged(framework.ClaimChanged, currentOrOld(old, now))
	})
	addHandler[*v1.PersistentVolume](s, func(old, now *v1.PersistentVolume) {
		s.storageChanged(framework.VolumeChanged, currentOrOld(old, now))
	})
	addHandler[*storagev1.CSINode](s, func(old, now *storagev1.CSINode) {
		s.queue.handleEvent(context.Background(), framework.DriversChanged, currentOrOld(old, now))
	})
	addHandler[*storagev1.StorageClass](s, func(old, now *storagev1.StorageClass) {
		s.storageChanged(framework.StorageClassChange, currentOrOld(old, now))
	})
	addHandler[*storagev1.CSIDriver](s, func(old, now *storagev1.CSIDriver) {
		s.storageChanged(framework.StorageClassChange, currentOrOld(old, now))
	})
	addHandler[*storagev1.CSIStorageCapacity](s, func(old, now *storagev1.CSIStorageCapacity) {
		s.storageChanged(framework.StorageClassChange, currentOrOld(old, now))
	})
	addHandler[*resourcev1.ResourceClaim](s, s.deviceClaimChanged)
	addHandler[*resourcev1.ResourceSlice](s, func(old, now *resourcev1.ResourceSlice) {
		s.queue.handleEvent(context.Background(), framework.SliceChanged, currentOrOld(old, now))
	})
	addHandler[*resourcev1.DeviceClass](s, func(old, now *resourcev1.DeviceClass) {
		s.queue.handleEvent(context.Background(), framework.DeviceClassChanged, currentOrOld(old, now))
	})
}

func (s *Scheduler) deviceClaimChanged(old, now *resourcev1.ResourceClaim) {
	s.observeClaim(currentOrOld(old, now), now == nil)
	s.devices.wakeAll()
	s.queue.handleEvent(context.Background(), framework.DeviceClaimChanged, currentOrOld(old, now))
}

// observeClaim records in the device Ledger the current devices of a ResourceClaim. gone means that
// the claim was deleted.
func (s *Scheduler) observeClaim(c *resourcev1.ResourceClaim, gone bool) {
	if shared := s.profiles.shared; shared != nil {
		shared.Ledger.Observe(c, gone)
	}
}

// addHandler registers f as a handler of all changes of T. old is nil on creation, and now is nil
// on deletion.
func addHandler[T interface {
	api.Object
	comparable
}](s *Scheduler, f func(old, now T)) {
	var none T
	_, err := client.Informer[T](s.cfg.Informers).AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc: func(o any) {
			if t, ok := o.(T); ok {
				s.applyChange(func() { f(none, t) })
			}
		},
		UpdateFunc: func(old, o any) {
			a, _ := old.(T)
			if b, ok := o.(T); ok {
				s.applyChange(func() { f(a, b) })
			}
		},
		DeleteFunc: func(o any) {
			if d, ok := o.(cache.DeletedFinalStateUnknown); ok {
				o = d.Obj
			}
			if t, ok := o.(T); ok {
				s.applyChange(func() { f(t, none) })
			}
		},
	})
	if err != nil {
		panic(fmt.Sprintf("scheduler: watch %T: %v", none, err)) // cannot fail: the informer has not started
	}
}

// applyChange calls change, which handles one change from an informer. Changes are handled one at a
// time, also while syncFromInformers runs. A panic is logged, and the change is dropped.
func (s *Scheduler) applyChange(change func()) {
	s.changeMu.Lock()
	defer s.changeMu.Unlock()
	defer func() {
		if p := recover(); p != nil {
			s.log.Error("panic while handling a change", "panic", p, "stack", string(debug.Stack()))
		}
	}()
	change()
}

// currentOrOld returns the current object, or the old one if the object was deleted.
func currentOrOld[T comparable](old, now T) T {
	var none T
	if now != none {
		return now
	}
	return old
}

func isTerminal(pod *v1.Pod) bool {
	return pod.Status.Phase == v1.PodSucceeded || pod.Status.Phase == v1.PodFailed
}

// podChanged handles a change of one pod: it updates the group, the queue and the cluster state to
// the pod's current state. old only determines the kind of event that is reported to waiting pods.
func (s *Scheduler) podChanged(old, now *v1.Pod) {
	ctx := context.Background() // for PreEnqueue plugins; nothing here blocks
	if pod := currentOrOld(old, now); s.groups.observePod(pod, now == nil || isTerminal(pod) || pod.DeletionTimestamp != nil) {
		key, _ := framework.GroupOf(pod)
		defer s.queue.handleEvent(ctx, framework.GroupChanged, key)
	}
	switch {
	case now == nil:
		s.queue.removePod(old.UID)
		s.waiting.rejectWaiting(old.UID, "the pod was deleted")
		if s.cluster.removePod(old.UID) {
			s.queue.handleEvent(ctx, framework.PodRemoved, old)
		}
	case isTerminal(now):
		s.queue.removePod(now.UID)
		if s.cluster.removePod(now.UID) {
			s.queue.handleEvent(ctx, framework.PodRemoved, now)
		}
	case now.Spec.NodeName != "":
		if old != nil && old.Spec.NodeName != "" && sameForScheduling(old, now) {
			if s.cluster.isPlaced(now.UID) {
				return // usually only the status changed
			}
		}
		s.cluster.addBoundPod(now)
		s.queue.removePod(now.UID)
		if old != nil && old.Spec.NodeName != "" {
			s.queue.handleEvent(ctx, framework.PodUpdated, framework.PodUpdate{Old: old, Now: now})
		} else {
			s.queue.handleEvent(ctx, framework.PodAdded, now)
		}
	case s.profiles.forPod(now) == nil, now.DeletionTimestamp != nil:
		s.queue.removePod(now.UID)
		s.waiting.rejectWaiting(now.UID, "the pod is being deleted")
		s.cluster.nominateNode(framework.NewPodInfo(now), "")
	default:
		was := ""
		if old != nil {
			was = old.Status.NominatedNodeName
		}
		if node := now.Status.NominatedNodeName; node != was {
			s.cluster.nominateNode(framework.NewPodInfo(now), node)
		}
		s.queue.addOrUpdate(ctx, now)
	}
}

func (s *Scheduler) nodeChanged(old, now *v1.Node) {
	if now == nil {
		s.cluster.removeNode(old.Name)
		return
	}
	ctx := context.Background()
	if old == nil {
		s.cluster.setNode(now)
		s.queue.handleEvent(ctx, framework.NodeAdded, now)
		return
	}
	allocatable := !equality.Semantic.DeepEqual(old.Status.Allocatable, now.Status.Allocatable)
	labels := !maps.Equal(old.Labels, now.Labels)
	taints := old.Spec.Unschedulable != now.Spec.Unschedulable || !equality.Semantic.DeepEqual(old.Spec.Taints, now.Spec.Taints)
	images := len(old.Status.Images) != len(now.Status.Images)
	if !allocatable && !labels && !taints && !images {
		return // only conditions and similar fields changed, which no plugin uses
	}
	s.cluster.setNode(now)
	for _, e := range []struct {
		is    bool
		event framework.Event
	}{{allocatable, framework.NodeAllocatable}, {labels, framework.NodeLabels}, {taints, framework.NodeTaints}} {
		if e.is {
			s.queue.handleEvent(ctx, e.event, now)
		}
	}
}

// namespaceChanged handles a change of a namespace's labels, by which affinity terms select
// namespaces.
func (s *Scheduler) namespaceChanged(old, now *v1.Namespace) {
	if now == nil {
		s.cluster.removeNamespace(old.Name)
		return
	}
	if old != nil && maps.Equal(old.Labels, now.Labels) {
		return
	}
	s.cluster.setNamespace(now.Name, now.Labels)
	s.queue.handleEvent(context.Background(), framework.NamespaceLabels, now)
}

func (s *Scheduler) serviceChanged(old, now *v1.Service) {
	if now == nil {
		s.cluster.setService(old.Namespace, old.Name, nil)
		return
	}
	s.cluster.setService(now.Namespace, now.Name, now.Spec.Selector)
}

// ownerSelector returns the pod selector of the controller to which ref refers. It returns nil if
// the controller is not in the cache, or is not a ReplicationController, ReplicaSet or StatefulSet.
func (s *Scheduler) ownerSelector(namespace string, ref *metav1.OwnerReference) labels.Selector {
	i := s.cfg.Informers
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

func (s *Scheduler) storageChanged(e framework.Event, obj any) {
	s.volumes.wakeAll()
	s.queue.handleEvent(context.Background(), e, obj)
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

// syncFromInformers updates the queue, the cluster state and the device Ledger to the current state
// of the informers' stores.
func (s *Scheduler) syncFromInformers(ctx context.Context) {
	for _, ns := range client.CachedList[*v1.Namespace](s.cfg.Informers, "", nil) {
		s.applyChange(func() {
			if now, ok := client.Cached[*v1.Namespace](s.cfg.Informers, "", ns.Name); ok {
				s.cluster.setNamespace(now.Name, now.Labels)
			}
		})
	}
	for _, c := range client.CachedList[*resourcev1.ResourceClaim](s.cfg.Informers, "", nil) {
		s.applyChange(func() {
			if now, ok := client.Cached[*resourcev1.ResourceClaim](s.cfg.Informers, c.Namespace, c.Name); ok {
				s.observeClaim(now, false)
			}
		})
	}
	s.syncNodes(client.CachedList[*v1.Node](s.cfg.Informers, "", nil))
	s.syncPods(ctx, client.CachedList[*v1.Pod](s.cfg.Informers, "", nil))
}

// syncNodes updates the cluster state to the nodes in the informer. Each node is looked up again
// first. The informer may have reported a node of the list as deleted meanwhile, and nothing would
// remove the node later.
func (s *Scheduler) syncNodes(nodes []*v1.Node) {
	for _, n := range nodes {
		s.applyChange(func() {
			if now, ok := client.Cached[*v1.Node](s.cfg.Informers, "", n.Name); ok {
				s.cluster.setNode(now)
			}
		})
	}
}

// syncPods updates the queue and the cluster state to the pods in the informer. Each pod is looked
// up again first, as in syncNodes.
func (s *Scheduler) syncPods(ctx context.Context, pods []*v1.Pod) {
	for _, pod := range pods {
		if ctx.Err() != nil {
			return
		}
		s.applyChange(func() {
			if now, ok := client.Cached[*v1.Pod](s.cfg.Informers, pod.Namespace, pod.Name); ok {
				s.podChanged(nil, now)
			}
		})
	}
}

// newHandle returns a handle through which plugins read the cluster and act on it. Fits and
// Extenders are not set.
func (s *Scheduler) newHandle() *framework.Handle {
	i := s.cfg.Informers
	h := &framework.Handle{
		Volumes: s.storageAccess(),
		Devices: s.deviceAccess(),
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
		Preempt:  s.preemptPods,
		Nominate: s.nominatePod,
		Bind:     s.postBinding,
		UpdateClaim: func(ctx context.Context, c *v1.PersistentVolumeClaim) (*v1.PersistentVolumeClaim, error) {
			return client.Update(ctx, s.writer.Load(), c)
		},
		UpdateVolume: func(ctx context.Context, v *v1.PersistentVolume) (*v1.PersistentVolume, error) {
			return client.Update(ctx, s.writer.Load(), v)
		},
		AwaitVolumes: s.volumes.awaitChange,
		Waiting:      s.waiting.waitingPod,
		EachWaiting:  s.waiting.forEach,
	}
	return h
}

// storageAccess returns functions that look up storage objects in the informers, which
// registerHandlers has created.
func (s *Scheduler) storageAccess() framework.Volumes {
	i := s.cfg.Informers
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
		KnowsRoom: func(driver string) bool {
			d, ok := client.Cached[*storagev1.CSIDriver](i, "", driver)
			return ok && d.Spec.StorageCapacity != nil && *d.Spec.StorageCapacity
		},
		RoomFor: func(class string) []*storagev1.CSIStorageCapacity {
			return slices.DeleteFunc(client.CachedList[*storagev1.CSIStorageCapacity](i, "", nil),
				func(c *storagev1.CSIStorageCapacity) bool { return c.StorageClassName != class })
		},
	}
}

// deviceAccess returns functions that look up devices and ResourceClaims, and write ResourceClaims.
func (s *Scheduler) deviceAccess() framework.Devices {
	i := s.cfg.Informers
	return framework.Devices{
		DeviceClaim: func(namespace, name string) (*resourcev1.ResourceClaim, bool) {
			return client.Cached[*resourcev1.ResourceClaim](i, namespace, name)
		},
		DeviceClass: func(name string) (*resourcev1.DeviceClass, bool) {
			return client.Cached[*resourcev1.DeviceClass](i, "", name)
		},
		DeviceClasses: func() []*resourcev1.DeviceClass { return client.CachedList[*resourcev1.DeviceClass](i, "", nil) },
		Slices:        func() []*resourcev1.ResourceSlice { return client.CachedList[*resourcev1.ResourceSlice](i, "", nil) },
		DeviceClaimNow: func(ctx context.Context, namespace, name string) (*resourcev1.ResourceClaim, error) {
			return client.Get[*resourcev1.ResourceClaim](ctx, s.writer.Load(), namespace, name)
		},
		UpdateDeviceClaim: func(ctx context.Context, c *resourcev1.ResourceClaim) (*resourcev1.ResourceClaim, error) {
			return client.Update(ctx, s.writer.Load(), c)
		},
		UpdateDeviceClaimStatus: func(ctx context.Context, c *resourcev1.ResourceClaim) (*resourcev1.ResourceClaim, error) {
			return client.UpdateStatus(ctx, s.writer.Load(), c)
		},
		AwaitDevices: s.devices.awaitChange,
	}
}
