package devicetainteviction

import (
	"context"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	resourcev1 "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/client-go/tools/cache"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/controllers/engine"
)

var eviction = engine.Eviction{Reason: "DeletionByDeviceTaintManager",
	Message: "Device taint manager: deleting due to NoExecute taint of a device", Event: "DeviceTaintManagerEviction"}

// poolIndex indexes ResourceSlices by their pool, and ResourceClaims by the pools of their devices,
// as driver/pool.
const poolIndex = "keelson.devicepool"

func poolOf(driver, pool string) string { return driver + "/" + pool }

func poolKeys(o api.Object) (out []string) {
	switch o := o.(type) {
	case *resourcev1.ResourceSlice:
		out = []string{poolOf(o.Spec.Driver, o.Spec.Pool.Name)}
	case *resourcev1.ResourceClaim:
		if o.Status.Allocation == nil {
			return nil
		}
		seen := map[string]bool{}
		for i := range o.Status.Allocation.Devices.Results {
			d := &o.Status.Allocation.Devices.Results[i]
			if p := poolOf(d.Driver, d.Pool); !seen[p] {
				seen[p] = true
				out = append(out, p)
			}
		}
	}
	return out
}

// New returns the controller that evicts pods from devices with NoExecute taints.
func New(d engine.Deps) *engine.Descriptor {
	pods := client.Informer[*corev1.Pod](d.Informers)
	claims := client.Informer[*resourcev1.ResourceClaim](d.Informers)
	slices := client.Informer[*resourcev1.ResourceSlice](d.Informers)
	engine.Index(claims, poolIndex, poolKeys)
	engine.Index(slices, poolIndex, poolKeys)
	return &engine.Descriptor{
		Name:    "device-taint-eviction-controller",
		Workers: 8,
		Watches: []engine.Watch{
			engine.OnInformer(claims, func(c engine.Change[*resourcev1.ResourceClaim]) []engine.Key {
				if c.Type == engine.Deleted || len(c.New.Status.ReservedFor) == 0 || c.New.Status.Allocation == nil {
					return nil
				}
				return []engine.Key{engine.KeyOf(c.New)}
			}),
			engine.OnInformer(slices, func(c engine.Change[*resourcev1.ResourceSlice]) []engine.Key {
				if c.Type == engine.Deleted || !hasEvictingTaint(c.New) {
					// a claim that tolerates a taint for some time is reconciled again when that
					// time has passed
					return nil
				}
				var keys []engine.Key
				for _, claim := range engine.CachedBy[*resourcev1.ResourceClaim](claims, poolIndex,
					poolOf(c.New.Spec.Driver, c.New.Spec.Pool.Name)) {
					keys = append(keys, engine.KeyOf(claim))
				}
				return keys
			}),
		},
		Rules: []rbacv1.PolicyRule{
			{APIGroups: []string{resourcev1.GroupName}, Resources: []string{"resourceclaims", "resourceslices"},
				Verbs: []string{"get", "list", "watch"}},
			{APIGroups: []string{""}, Resources: []string{"pods"}, Verbs: []string{"delete", "get", "list", "watch"}},
			{APIGroups: []string{""}, Resources: []string{"pods/status"}, Verbs: []string{"update"}},
			{APIGroups: []string{""}, Resources: []string{"events"}, Verbs: []string{"create", "patch", "update"}},
		},
		Lead: func(t *engine.Term) engine.Reconcile {
			r := &reconciler{term: t, claims: claims, slices: slices, pods: engine.ViewOf[*corev1.Pod](t, pods)}
			return r.reconcileClaim
		},
	}
}

// hasEvictingTaint reports whether a device of the slice has a NoExecute taint.
func hasEvictingTaint(s *resourcev1.ResourceSlice) bool {
	for i := range s.Spec.Devices {
		for j := range s.Spec.Devices[i].Taints {
			if s.Spec.Devices[i].Taints[j].Effect == resourcev1.DeviceTaintEffectNoExecute {
				return true
			}
		}
	}
	return false
}

type reconciler struct {
	term           *engine.Term
	claims, slices cache.SharedIndexInformer
	pods           *engine.View[*corev1.Pod]
}

func (r *reconciler) reconcileClaim(ctx context.Context, key engine.Key) (time.Duration, error) {
	c, ok := engine.Cached[*resourcev1.ResourceClaim](r.claims, key.Namespace, key.Name)
	if !ok || len(c.Status.ReservedFor) == 0 {
		return 0, nil
	}
	at, evict := Eviction(c, r.deviceTaints)
	if !evict {
		return 0, nil
	}
	if left := at.Sub(r.term.Now()); left > 0 {
		return left, nil
	}
	for _, user := range c.Status.ReservedFor {
		if user.APIGroup != "" || user.Resource != "pods" {
			continue
		}
		if err := r.evictConsumer(ctx, c.Namespace, user); err != nil {
			return 0, err
		}
	}
	return 0, nil
}

// deviceTaints returns the taints of a device, or nil if the device does not exist.
func (r *reconciler) deviceTaints(driver, pool, device string) []resourcev1.DeviceTaint {
	for _, s := range Newest(engine.CachedBy[*resourcev1.ResourceSlice](r.slices, poolIndex, poolOf(driver, pool))) {
		for i := range s.Spec.Devices {
			if s.Spec.Devices[i].Name == device {
				return s.Spec.Devices[i].Taints
			}
		}
	}
	return nil
}

// evictConsumer deletes the consumer of a ResourceClaim, a pod. If the pod is not cached, it reads
// the pod from the API, because the claim's reservation may be newer than the cache.
func (r *reconciler) evictConsumer(
	ctx context.Context, namespace string, consumer resourcev1.ResourceClaimConsumerReference,
) error {
	p, ok := r.pods.Get(namespace, consumer.Name)
	if !ok || p.UID != consumer.UID {
		var err error
		p, err = client.Get[*corev1.Pod](ctx, r.term.Client, namespace, consumer.Name)
		switch {
		case apierrors.IsNotFound(err):
			return nil
		case err != nil:
			return fmt.Errorf("reading pod %s/%s, whose device is tainted: %w", namespace, consumer.Name, err)
		}
	}
	if p.UID != consumer.UID || api.IsPodTerminal(p) || r.pods.IsDeleting(p) {
		return nil
	}
	return eviction.Evict(ctx, r.term, r.pods, p)
}
