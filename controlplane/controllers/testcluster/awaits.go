package testcluster

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/custom"
	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/controllers/engine"
)

// CheckUsesClaim returns an error unless the pod uses the claim, both in namespace default.
func (w *Cluster) CheckUsesClaim(pod, claim string) error {
	p, err := client.Get[*corev1.Pod](w.Ctx, w.Admin, "default", pod)
	if err == nil && !slices.Contains(engine.PodClaimKeys(p), "default/"+claim) {
		err = fmt.Errorf("pod %s uses %v", pod, engine.PodClaimKeys(p))
	}
	return err
}

// CheckVolumePhase returns nil if the PersistentVolume has the phase.
func (w *Cluster) CheckVolumePhase(name string, phase corev1.PersistentVolumePhase) error {
	v, err := client.Get[*corev1.PersistentVolume](w.Ctx, w.Admin, "", name)
	if err == nil && v.Status.Phase != phase {
		err = fmt.Errorf("volume %s is %s", name, v.Status.Phase)
	}
	return err
}

// AwaitDaemons waits until the DaemonSet has an available pod of the image on each of these nodes
// and on no other node.
func (w *Cluster) AwaitDaemons(name, image string, nodes ...string) {
	w.T.Helper()
	w.Eventually("daemons "+name, func() error {
		d, err := client.Get[*appsv1.DaemonSet](w.Ctx, w.Admin, "default", name)
		if err != nil {
			return err
		}
		n := int32(len(nodes))
		if s := d.Status; s.ObservedGeneration != d.Generation || s.DesiredNumberScheduled != n ||
			s.NumberAvailable != n || s.UpdatedNumberScheduled != n || s.NumberMisscheduled != 0 {
			return fmt.Errorf("%+v", s)
		}
		want, have := map[string]string{}, map[string]string{}
		for _, node := range nodes {
			want[node] = image
		}
		for _, p := range w.LivePods() {
			if p.Labels["app"] == name {
				have[p.Spec.NodeName] += p.Spec.Containers[0].Image
			}
		}
		if !maps.Equal(want, have) {
			return fmt.Errorf("on the nodes runs %v", have)
		}
		return nil
	})
}

// CreateCustom stores an object of custom kind k. text is the object as YAML without apiVersion and
// kind. The namespace of a namespaced object is default unless text contains another namespace.
func CreateCustom(w *Cluster, k *api.Kind, text string) {
	w.T.Helper()
	var all map[string]any
	if err := yaml.Unmarshal([]byte(text), &all); err != nil {
		w.T.Fatal(err)
	}
	all["apiVersion"], all["kind"] = k.GVK.GroupVersion().String(), k.GVK.Kind
	o, err := custom.FromMap(all)
	if err != nil {
		w.T.Fatal(err)
	}
	if k.Namespaced && o.Namespace == "" {
		o.Namespace = "default"
	}
	if _, err := w.Admin.Do(w.Ctx, &api.Request{Verb: api.VerbCreate, Kind: k, Namespace: o.Namespace,
		Object: o}); err != nil {
		w.T.Fatalf("%s: %v", text, err)
	}
}

// AllocateDevice allocates a device to a ResourceClaim, as a scheduler does. It reserves the claim
// for a pod unless pod is "". change may modify the allocated device before it is written.
func (w *Cluster) AllocateDevice(claim, pod string, change ...func(d *resourcev1.DeviceRequestAllocationResult)) {
	w.T.Helper()
	w.Eventually("allocation of "+claim, func() error {
		c, err := client.Get[*resourcev1.ResourceClaim](w.Ctx, w.Admin, "default", claim)
		if err != nil {
			return err
		}
		c = c.DeepCopy()
		if len(c.Finalizers) == 0 {
			c.Finalizers = []string{resourcev1.Finalizer}
			if c, err = client.Update(w.Ctx, w.Admin, c); err != nil {
				return err
			}
		}
		c.Status.Allocation = &resourcev1.AllocationResult{Devices: resourcev1.DeviceAllocationResult{
			Results: []resourcev1.DeviceRequestAllocationResult{{Request: "r", Driver: "gpu.example.com", Pool: "w1",
				Device: "dev-0"}}}}
		for _, f := range change {
			f(&c.Status.Allocation.Devices.Results[0])
		}
		if pod != "" {
			p, err := client.Get[*corev1.Pod](w.Ctx, w.Admin, "default", pod)
			if err != nil {
				return err
			}
			c.Status.ReservedFor = []resourcev1.ResourceClaimConsumerReference{{Resource: "pods",
				Name: pod, UID: p.UID}}
		}
		_, err = client.UpdateStatus(w.Ctx, w.Admin, c)
		return err
	})
}

// AwaitStatefulSet waits until a StatefulSet has exactly n pods, all available and of the newest
// template.
func (w *Cluster) AwaitStatefulSet(name string, n int32) {
	w.T.Helper()
	w.EventuallyWithin(30*time.Second, "stateful set "+name, func() error {
		s, err := client.Get[*appsv1.StatefulSet](w.Ctx, w.Admin, "default", name)
		if err != nil {
			return err
		}
		if st := s.Status; st.ObservedGeneration != s.Generation || st.Replicas != n || st.AvailableReplicas != n ||
			st.UpdatedReplicas != n ||
			st.CurrentRevision != st.UpdateRevision {
			return fmt.Errorf("%+v", st)
		}
		return nil
	})
}

// AwaitBound waits until a claim is bound.
func (w *Cluster) AwaitBound(name string) {
	w.T.Helper()
	w.AwaitClaim(name, func(c *corev1.PersistentVolumeClaim) bool { return c.Status.Phase == corev1.ClaimBound })
}

// AwaitClaim waits until a claim of namespace default exists and condition returns true for it.
func (w *Cluster) AwaitClaim(name string, condition func(c *corev1.PersistentVolumeClaim) bool) {
	w.T.Helper()
	w.EventuallyWithin(time.Minute, "claim "+name, func() error {
		c, err := client.Get[*corev1.PersistentVolumeClaim](w.Ctx, w.Admin, "default", name)
		if err == nil && !condition(c) {
			err = fmt.Errorf("it is %+v", c.Status)
		}
		return err
	})
}

// RequestSize sets the requested size of the claim.
func (w *Cluster) RequestSize(claim, size string) {
	w.T.Helper()
	Update(w, claim, func(c *corev1.PersistentVolumeClaim) { c.Spec.Resources.Requests = StorageSize(size) })
}

// HasCapacity returns a condition for AwaitClaim. The condition is true if the claim has the size,
// and no expansion is in progress.
func HasCapacity(size string) func(c *corev1.PersistentVolumeClaim) bool {
	return func(c *corev1.PersistentVolumeClaim) bool {
		q := StorageSize(size)[corev1.ResourceStorage]
		return q.Cmp(c.Status.Capacity[corev1.ResourceStorage]) == 0 && len(c.Status.Conditions) == 0 &&
			len(c.Status.AllocatedResourceStatuses) == 0
	}
}

// BoundVolume waits until a claim is bound and returns its PersistentVolume.
func (w *Cluster) BoundVolume(name string) *corev1.PersistentVolume {
	w.T.Helper()
	w.AwaitBound(name)
	c, err := client.Get[*corev1.PersistentVolumeClaim](w.Ctx, w.Admin, "default", name)
	if err != nil {
		w.T.Fatal(err)
	}
	v, err := client.Get[*corev1.PersistentVolume](w.Ctx, w.Admin, "", c.Spec.VolumeName)
	if err != nil {
		w.T.Fatal(err)
	}
	return v
}

// DeleteClaim deletes the claim.
func (w *Cluster) DeleteClaim(name string) {
	w.T.Helper()
	if err := client.Delete[*corev1.PersistentVolumeClaim](w.Ctx, w.Admin, "default", name,
		metav1.DeleteOptions{}); err != nil {
		w.T.Fatal(err)
	}
}

// AwaitEvent waits for an Event with this reason and message.
func (w *Cluster) AwaitEvent(reason, message string) {
	w.T.Helper()
	w.Eventually("event "+reason, func() error {
		list, err := client.List[*corev1.Event](w.Ctx, w.Admin, "", metav1.ListOptions{})
		if err != nil {
			return err
		}
		seen := ""
		for _, e := range list {
			if e.Reason == reason && e.Message == message {
				return nil
			}
			seen += e.Reason + ": " + e.Message + "\n"
		}
		return fmt.Errorf("%q is not among:\n%s", message, seen)
	})
}

// AwaitRest waits until the controllers have made no API call during five consecutive checks of
// Eventually.
func (w *Cluster) AwaitRest() {
	w.T.Helper()
	var calls int64
	quiet := 0
	w.Eventually("coming to rest", func() error {
		now := w.Calls.Reads.Load() + w.Calls.Writes.Load()
		if quiet++; now != calls {
			calls, quiet = now, 0
		}
		if quiet < 5 {
			return errors.New("still moving")
		}
		return nil
	})
}
