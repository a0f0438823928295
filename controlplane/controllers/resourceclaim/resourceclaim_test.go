package resourceclaim_test

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
	"keelson.dev/keelson/controlplane/controllers/engine"
	"keelson.dev/keelson/controlplane/controllers/testcluster"
)

func deviceTemplate() *resourcev1.ResourceClaimTemplate {
	return &resourcev1.ResourceClaimTemplate{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "gpu"},
		Spec: resourcev1.ResourceClaimTemplateSpec{Spec: testcluster.NewDeviceRequest()}}
}

// deviceClaim is the one claim of a pod, which its status names.
func deviceClaim(w *testcluster.Cluster, pod string) (*resourcev1.ResourceClaim, error) {
	p, err := client.Get[*corev1.Pod](w.Ctx, w.Admin, "default", pod)
	if err != nil {
		return nil, err
	}
	s := p.Status.ResourceClaimStatuses
	if len(s) != 1 || s[0].Name != "gpu" || s[0].ResourceClaimName == nil {
		return nil, fmt.Errorf("pod %s names %v", pod, s)
	}
	claims, err := client.List[*resourcev1.ResourceClaim](w.Ctx, w.Admin, "default", metav1.ListOptions{})
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

// A pod that requests devices by a template gets its own claim as soon as the template exists;
// events report the missing template until then. When the pod has ended, the claim's devices are
// deallocated and the claim is deleted. A claim that a user created stays, without devices.
func TestResourceClaims(t *testing.T) {
	w := testcluster.StartCluster(t, testcluster.Options{})
	w.CreateObject(testcluster.NewDevicePod("web"))
	w.Eventually("the missing template is told", func() error {
		list, err := client.List[*corev1.Event](w.Ctx, w.Admin, "default", metav1.ListOptions{})
		if err != nil {
			return err
		}
		for _, e := range list {
			if e.Reason == "FailedResourceClaimCreation" &&
				strings.Contains(e.Message, `PodResourceClaim gpu: resource claim template "gpu": not found`) {
				return nil
			}
		}
		return errors.New("no event")
	})
	w.CreateObject(deviceTemplate())
	var claim *resourcev1.ResourceClaim
	w.Eventually("the claim", func() (err error) { claim, err = deviceClaim(w, "web"); return err })
	w.AllocateDevice(claim.Name, "web")

	w.CreateObject(&resourcev1.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "common"},
		Spec: testcluster.NewDeviceRequest()})
	w.AllocateDevice("common", "")
	user := testcluster.NewDevicePod("user")
	common := "common"
	user.Spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "c", ResourceClaimName: &common}}
	w.CreateObject(user)
	w.Eventually("what has a node by other means is reserved for", func() error {
		c, err := client.Get[*resourcev1.ResourceClaim](w.Ctx, w.Admin, "default", "common")
		if err != nil || len(c.Status.ReservedFor) != 1 || c.Status.ReservedFor[0].Name != "user" {
			return fmt.Errorf("%+v, %v", c, err)
		}
		return nil
	})

	end := func(name string) {
		w.Eventually("ending "+name, func() error {
			p, err := client.Get[*corev1.Pod](w.Ctx, w.Admin, "default", name)
			if err != nil {
				return err
			}
			p = p.DeepCopy()
			p.Status.Phase = corev1.PodSucceeded
			_, err = client.UpdateStatus(w.Ctx, w.Admin, p)
			return err
		})
	}
	end("web")
	w.Eventually("the pod's own claim goes", func() error {
		return testcluster.CheckGone[*resourcev1.ResourceClaim](w, claim.Name)
	})
	end("user")
	w.Eventually("devices are given back", func() error {
		c, err := client.Get[*resourcev1.ResourceClaim](w.Ctx, w.Admin, "default", "common")
		if err != nil || c.Status.Allocation != nil || len(c.Status.ReservedFor) > 0 {
			return fmt.Errorf("%+v, %v", c, err)
		}
		return nil
	})
	if err := client.Delete[*resourcev1.ResourceClaim](w.Ctx, w.Admin, "default", "common",
		metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	w.Eventually("a claim that nobody uses can be deleted", func() error {
		return testcluster.CheckGone[*resourcev1.ResourceClaim](w, "common")
	})
}

// Regardless of lost calls, crashes and leader changes: each pod has its own claim, even if a pod
// of the same name existed before. Devices stay allocated while the pod runs, and no claim outlives
// its pod.
func TestResourceClaimsUnderFailures(t *testing.T) {
	w := testcluster.New(t, testcluster.Options{NoMutationGuard: true,
		ChangeController: testcluster.FailReconcilesAmong("resourceclaim-controller", 2, time.Millisecond)})
	settings := engine.Options{Resync: 30 * time.Millisecond}
	stop := w.Lead(settings)
	w.AddNode("w1")
	w.CreateObject(deviceTemplate())
	const pods = 8
	for round := range 3 {
		for i := range pods {
			w.CreateObject(testcluster.NewDevicePod(fmt.Sprint("p", i)))
		}
		stop()
		stop = w.Lead(settings)
		claims := map[string]string{}
		for i := range pods {
			pod := fmt.Sprint("p", i)
			w.EventuallyWithin(20*time.Second, "the claim", func() error {
				c, err := deviceClaim(w, pod)
				if err == nil {
					claims[pod] = c.Name
				}
				return err
			})
			w.AllocateDevice(claims[pod], pod)
		}
		for pod, name := range claims {
			if c, err := client.Get[*resourcev1.ResourceClaim](w.Ctx, w.Admin, "default", name); err != nil ||
				c.Status.Allocation == nil {
				t.Fatalf("round %d: the devices of pod %s: %+v, %v", round, pod, c, err)
			}
			now := int64(0)
			err := client.Delete[*corev1.Pod](w.Ctx, w.Admin, "default", pod,
				metav1.DeleteOptions{GracePeriodSeconds: &now})
			if err != nil && !apierrors.IsNotFound(err) {
				t.Fatal(err)
			}
		}
		w.EventuallyWithin(20*time.Second, "the pods go", func() error {
			if n := len(w.LivePods()); n > 0 {
				return fmt.Errorf("%d pods", n)
			}
			return nil
		})
		for _, name := range claims {
			w.EventuallyWithin(20*time.Second, "the claim goes", func() error {
				return testcluster.CheckGone[*resourcev1.ResourceClaim](w, name)
			})
		}
	}
}
