package scheduler

import (
	"context"
	"fmt"
	"maps"
	"runtime/debug"

	v1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/client-go/tools/cache"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/scheduler/framework"
)

// watch registers the handlers that feed queue and cluster.
func (s *Scheduler) watch() {
	handle[*v1.Pod](s, s.podChanged)
	handle[*v1.Node](s, s.nodeChanged)
	handle[*v1.PersistentVolumeClaim](s, func(old, now *v1.PersistentVolumeClaim) {
		s.storageChanged(framework.ClaimChanged, pick(old, now))
	})
	handle[*v1.PersistentVolume](s, func(old, now *v1.PersistentVolume) {
		s.storageChanged(framework.VolumeChanged, pick(old, now))
	})
	handle[*storagev1.StorageClass](s, func(old, now *storagev1.StorageClass) {
		s.storageChanged(framework.StorageClassChange, pick(old, now))
	})
}

// handle registers f for all changes of T; old or now is nil on creation and deletion.
func handle[T interface {
	api.Object
	comparable
}](s *Scheduler, f func(old, now T)) {
	var none T
	_, err := client.Informer[T](s.cfg.Informers).AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc: func(o any) {
			if t, ok := o.(T); ok {
				s.take(func() { f(none, t) })
			}
		},
		UpdateFunc: func(old, o any) {
			a, _ := old.(T)
			if b, ok := o.(T); ok {
				s.take(func() { f(a, b) })
			}
		},
		DeleteFunc: func(o any) {
			if d, ok := o.(cache.DeletedFinalStateUnknown); ok {
				o = d.Obj
			}
			if t, ok := o.(T); ok {
				s.take(func() { f(t, none) })
			}
		},
	})
	if err != nil {
		panic(fmt.Sprintf("scheduler: watch %T: %v", none, err)) // the informer has not started: this cannot fail
	}
}

// take takes one change in. Changes come one at a time, so that adopt can tell what is still to come. One that
// cannot be understood is lost, and nothing else.
func (s *Scheduler) take(change func()) {
	s.intake.Lock()
	defer s.intake.Unlock()
	defer func() {
		if p := recover(); p != nil {
			s.log.Error("a change was not understood", "panic", p, "stack", string(debug.Stack()))
		}
	}()
	change()
}

// pick is the object as it is, or as it was when it is gone.
func pick[T comparable](old, now T) T {
	var none T
	if now != none {
		return now
	}
	return old
}

func finished(p *v1.Pod) bool {
	return p.Status.Phase == v1.PodSucceeded || p.Status.Phase == v1.PodFailed
}

// podChanged follows one pod. It looks at the present state only: old serves to tell what kind of event it was.
func (s *Scheduler) podChanged(old, now *v1.Pod) {
	ctx := context.Background() // PreEnqueue plugins take one; nothing here blocks
	switch {
	case now == nil:
		s.queue.remove(old.UID)
		s.waiting.reject(old.UID, "the pod was deleted")
		if s.cluster.remove(old.UID) {
			s.queue.happened(ctx, framework.PodRemoved, old)
		}
	case finished(now):
		s.queue.remove(now.UID)
		if s.cluster.remove(now.UID) {
			s.queue.happened(ctx, framework.PodRemoved, now)
		}
	case now.Spec.NodeName != "":
		if old != nil && old.Spec.NodeName != "" && sameForScheduling(old, now) && maps.Equal(old.Labels, now.Labels) {
			if s.cluster.placed(now.UID) {
				return // its status, most often
			}
		}
		s.cluster.place(now)
		s.queue.remove(now.UID)
		if old != nil && old.Spec.NodeName != "" {
			s.queue.happened(ctx, framework.PodUpdated, now)
		} else {
			s.queue.happened(ctx, framework.PodAdded, now)
		}
	case now.Spec.SchedulerName != "" && now.Spec.SchedulerName != v1.DefaultSchedulerName, now.DeletionTimestamp != nil:
		s.queue.remove(now.UID)
		s.waiting.reject(now.UID, "the pod is being deleted")
	default:
		s.queue.add(ctx, now)
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
		s.queue.happened(ctx, framework.NodeAdded, now)
		return
	}
	allocatable := !equality.Semantic.DeepEqual(old.Status.Allocatable, now.Status.Allocatable)
	labels := !maps.Equal(old.Labels, now.Labels)
	taints := old.Spec.Unschedulable != now.Spec.Unschedulable || !equality.Semantic.DeepEqual(old.Spec.Taints, now.Spec.Taints)
	images := len(old.Status.Images) != len(now.Status.Images)
	if !allocatable && !labels && !taints && !images {
		return // conditions and the like: no plugin looks at them
	}
	s.cluster.setNode(now)
	for _, e := range []struct {
		is    bool
		event framework.Event
	}{{allocatable, framework.NodeAllocatable}, {labels, framework.NodeLabels}, {taints, framework.NodeTaints}} {
		if e.is {
			s.queue.happened(ctx, e.event, now)
		}
	}
}

func (s *Scheduler) storageChanged(e framework.Event, obj any) {
	s.volumes.tell()
	s.queue.happened(context.Background(), e, obj)
}

// adopt brings queue and cluster up to what the informers hold.
func (s *Scheduler) adopt(ctx context.Context) {
	s.adoptNodes(client.CachedList[*v1.Node](s.cfg.Informers, "", nil))
	s.adoptPods(ctx, client.CachedList[*v1.Pod](s.cfg.Informers, "", nil))
}

// adoptNodes takes nodes in. Each is looked up again first: what the informer does not hold any more has been, or is
// about to be, reported as deleted, and nothing would ever take it away again. What it holds is reported later.
func (s *Scheduler) adoptNodes(nodes []*v1.Node) {
	for _, n := range nodes {
		s.take(func() {
			if now, ok := client.Cached[*v1.Node](s.cfg.Informers, "", n.Name); ok {
				s.cluster.setNode(now)
			}
		})
	}
}

// adoptPods takes pods in, like adoptNodes.
func (s *Scheduler) adoptPods(ctx context.Context, pods []*v1.Pod) {
	for _, p := range pods {
		if ctx.Err() != nil {
			return
		}
		s.take(func() {
			if now, ok := client.Cached[*v1.Pod](s.cfg.Informers, p.Namespace, p.Name); ok {
				s.podChanged(nil, now)
			}
		})
	}
}

// newHandle is what plugins can do.
func (s *Scheduler) newHandle() *framework.Handle {
	i := s.cfg.Informers
	// The informers of storage exist before Run: watch asks for all of them.
	h := &framework.Handle{
		Volumes: framework.Volumes{
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
		},
		Bind: s.postBinding,
		UpdateClaim: func(ctx context.Context, c *v1.PersistentVolumeClaim) (*v1.PersistentVolumeClaim, error) {
			return client.Update(ctx, s.writer.Load(), c)
		},
		UpdateVolume: func(ctx context.Context, v *v1.PersistentVolume) (*v1.PersistentVolume, error) {
			return client.Update(ctx, s.writer.Load(), v)
		},
		AwaitVolumes: s.volumes.await,
		Waiting:      s.waiting.get,
		EachWaiting:  s.waiting.each,
	}
	return h
}
