package controllers_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/controllers"
)

func oneDevice() resourcev1.ResourceClaimSpec {
	return resourcev1.ResourceClaimSpec{Devices: resourcev1.DeviceClaim{Requests: []resourcev1.DeviceRequest{
		{Name: "r", Exactly: &resourcev1.ExactDeviceRequest{DeviceClassName: "gpu.example.com"}}}}}
}

func deviceTemplate() *resourcev1.ResourceClaimTemplate {
	return &resourcev1.ResourceClaimTemplate{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "gpu"},
		Spec: resourcev1.ResourceClaimTemplateSpec{Spec: oneDevice()}}
}

// devicePod returns a pod that requests a device by a template.
func devicePod(name string) *corev1.Pod {
	template := "gpu"
	p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name}, Spec: app("x", 1, "x").Spec.Template.Spec}
	p.Spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "gpu", ResourceClaimTemplateName: &template}}
	return p
}

// deviceClaim is the one claim of a pod, which its status names.
func (w *world) deviceClaim(pod string) (*resourcev1.ResourceClaim, error) {
	p, err := client.Get[*corev1.Pod](w.ctx, w.admin, "default", pod)
	if err != nil {
		return nil, err
	}
	s := p.Status.ResourceClaimStatuses
	if len(s) != 1 || s[0].Name != "gpu" || s[0].ResourceClaimName == nil {
		return nil, fmt.Errorf("pod %s names %v", pod, s)
	}
	claims, err := client.List[*resourcev1.ResourceClaim](w.ctx, w.admin, "default", metav1.ListOptions{})
	if err != nil {
		return nil, err
	}
	var own []*resourcev1.ResourceClaim
	for _, c := range claims {
		if metav1.IsControlledBy(c, p) {
			own = append(own, c)
		}
	}
	if len(own) != 1 || own[0].Name != *s[0].ResourceClaimName || own[0].DeletionTimestamp != nil {
		return nil, fmt.Errorf("pod %s has %d claims, its status names %s", pod, len(own), *s[0].ResourceClaimName)
	}
	return own[0], nil
}

// allocate gives a claim a device, as a scheduler does, and reserves it for a pod, or with "" for none.
func (w *world) allocate(claim, pod string, change ...func(d *resourcev1.DeviceRequestAllocationResult)) {
	w.t.Helper()
	w.eventually("allocation of "+claim, func() error {
		c, err := client.Get[*resourcev1.ResourceClaim](w.ctx, w.admin, "default", claim)
		if err != nil {
			return err
		}
		c = c.DeepCopy()
		if len(c.Finalizers) == 0 {
			c.Finalizers = []string{resourcev1.Finalizer}
			if c, err = client.Update(w.ctx, w.admin, c); err != nil {
				return err
			}
		}
		c.Status.Allocation = &resourcev1.AllocationResult{Devices: resourcev1.DeviceAllocationResult{
			Results: []resourcev1.DeviceRequestAllocationResult{{Request: "r", Driver: "gpu.example.com", Pool: "w1", Device: "dev-0"}}}}
		for _, f := range change {
			f(&c.Status.Allocation.Devices.Results[0])
		}
		if pod != "" {
			p, err := client.Get[*corev1.Pod](w.ctx, w.admin, "default", pod)
			if err != nil {
				return err
			}
			c.Status.ReservedFor = []resourcev1.ResourceClaimConsumerReference{{Resource: "pods", Name: pod, UID: p.UID}}
		}
		_, err = client.UpdateStatus(w.ctx, w.admin, c)
		return err
	})
}

// A pod that requests devices by a template gets its own claim as soon as the template exists;
// events report the missing template until then. When the pod has ended, the claim's devices are
// deallocated and the claim is deleted. A claim that a user created stays, without devices.
func TestResourceClaims(t *testing.T) {
	w := start(t, options{})
	w.create(devicePod("web"))
	w.eventually("the missing template is told", func() error {
		list, err := client.List[*corev1.Event](w.ctx, w.admin, "default", metav1.ListOptions{})
		if err != nil {
			return err
		}
		for _, e := range list {
			if e.Reason == "FailedResourceClaimCreation" && strings.Contains(e.Message, `PodResourceClaim gpu: resource claim template "gpu": not found`) {
				return nil
			}
		}
		return errors.New("no event")
	})
	w.create(deviceTemplate())
	var claim *resourcev1.ResourceClaim
	w.eventually("the claim", func() (err error) { claim, err = w.deviceClaim("web"); return err })
	w.allocate(claim.Name, "web")

	w.create(&resourcev1.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "common"}, Spec: oneDevice()})
	w.allocate("common", "")
	user := devicePod("user")
	common := "common"
	user.Spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "c", ResourceClaimName: &common}}
	w.create(user)
	w.eventually("what has a node by other means is reserved for", func() error {
		c, err := client.Get[*resourcev1.ResourceClaim](w.ctx, w.admin, "default", "common")
		if err != nil || len(c.Status.ReservedFor) != 1 || c.Status.ReservedFor[0].Name != "user" {
			return fmt.Errorf("%+v, %v", c, err)
		}
		return nil
	})

	end := func(name string) {
		w.eventually("ending "+name, func() error {
			p, err := client.Get[*corev1.Pod](w.ctx, w.admin, "default", name)
			if err != nil {
				return err
			}
			p = p.DeepCopy()
			p.Status.Phase = corev1.PodSucceeded
			_, err = client.UpdateStatus(w.ctx, w.admin, p)
			return err
		})
	}
	end("web")
	w.eventually("the pod's own claim goes", func() error { return gone[*resourcev1.ResourceClaim](w, claim.Name) })
	end("user")
	w.eventually("devices are given back", func() error {
		c, err := client.Get[*resourcev1.ResourceClaim](w.ctx, w.admin, "default", "common")
		if err != nil || c.Status.Allocation != nil || len(c.Status.ReservedFor) > 0 {
			return fmt.Errorf("%+v, %v", c, err)
		}
		return nil
	})
	if err := client.Delete[*resourcev1.ResourceClaim](w.ctx, w.admin, "default", "common", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	w.eventually("a claim that nobody uses can be deleted", func() error { return gone[*resourcev1.ResourceClaim](w, "common") })
}

// Regardless of lost calls, crashes and leader changes: each pod has its own claim, even if a pod
// of the same name existed before. Devices stay allocated while the pod runs, and no claim outlives
// its pod.
func TestResourceClaimsUnderFailures(t *testing.T) {
	w := newWorld(t, options{quiet: true, change: failingAmong("resourceclaim-controller", 2, time.Millisecond)})
	engine := controllers.Options{Resync: 30 * time.Millisecond}
	stop := w.lead(engine)
	w.node("w1")
	w.create(deviceTemplate())
	const pods = 8
	for round := range 3 {
		for i := range pods {
			w.create(devicePod(fmt.Sprint("p", i)))
		}
		stop()
		stop = w.lead(engine)
		claims := map[string]string{}
		for i := range pods {
			pod := fmt.Sprint("p", i)
			w.within(20*time.Second, "the claim", func() error {
				c, err := w.deviceClaim(pod)
				if err == nil {
					claims[pod] = c.Name
				}
				return err
			})
			w.allocate(claims[pod], pod)
		}
		for pod, name := range claims {
			if c, err := client.Get[*resourcev1.ResourceClaim](w.ctx, w.admin, "default", name); err != nil || c.Status.Allocation == nil {
				t.Fatalf("round %d: the devices of pod %s: %+v, %v", round, pod, c, err)
			}
			now := int64(0)
			err := client.Delete[*corev1.Pod](w.ctx, w.admin, "default", pod, metav1.DeleteOptions{GracePeriodSeconds: &now})
			if err != nil && !apierrors.IsNotFound(err) {
				t.Fatal(err)
			}
		}
		w.within(20*time.Second, "the pods go", func() error {
			if n := len(w.pods()); n > 0 {
				return fmt.Errorf("%d pods", n)
			}
			return nil
		})
		for _, name := range claims {
			w.within(20*time.Second, "the claim goes", func() error { return gone[*resourcev1.ResourceClaim](w, name) })
		}
	}
}
