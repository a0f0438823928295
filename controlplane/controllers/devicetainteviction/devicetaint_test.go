package devicetainteviction_test

import (
	"fmt"
	"slices"
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
	"keelson.dev/keelson/internal/virtual"
)

// deviceSlice has n devices of node w1.
func deviceSlice(n int) *resourcev1.ResourceSlice {
	node := "w1"
	s := &resourcev1.ResourceSlice{ObjectMeta: metav1.ObjectMeta{Name: "w1-gpu"}, Spec: resourcev1.ResourceSliceSpec{
		Driver: "gpu.example.com", NodeName: &node,
		Pool: resourcev1.ResourcePool{Name: "w1", Generation: 1, ResourceSliceCount: 1}}}
	for i := range n {
		s.Spec.Devices = append(s.Spec.Devices, resourcev1.Device{Name: fmt.Sprint("dev-", i)})
	}
	return s
}

// sicken gives devices a NoExecute taint, and heals the others.
func sicken(w *testcluster.Cluster, devices ...string) {
	w.T.Helper()
	now := metav1.Now()
	testcluster.Update(w, "w1-gpu", func(s *resourcev1.ResourceSlice) {
		for i := range s.Spec.Devices {
			d := &s.Spec.Devices[i]
			if !slices.Contains(devices, d.Name) {
				d.Taints = nil
			} else if len(d.Taints) == 0 {
				d.Taints = []resourcev1.DeviceTaint{{Key: "sick", Effect: resourcev1.DeviceTaintEffectNoExecute,
					TimeAdded: &now}}
			}
		}
	})
}

// deviceUser is a pod of w1 that has a device; how long its claim bears that it is sick: less than 0 = for ever.
func deviceUser(w *testcluster.Cluster, name, device string, seconds int64) {
	w.T.Helper()
	w.CreateObject(&resourcev1.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name},
		Spec: testcluster.NewDeviceRequest()})
	p := testcluster.NewDevicePod(name)
	p.Spec.ResourceClaims[0] = corev1.PodResourceClaim{Name: "gpu", ResourceClaimName: &name}
	w.CreateObject(p)
	w.AllocateDevice(name, name, func(d *resourcev1.DeviceRequestAllocationResult) {
		d.Device = device
		if seconds == 0 {
			return
		}
		tol := resourcev1.DeviceToleration{Key: "sick", Operator: resourcev1.DeviceTolerationOpExists}
		if seconds > 0 {
			tol.TolerationSeconds = &seconds
		}
		d.Tolerations = []resourcev1.DeviceToleration{tol}
	})
}

// left are the names of the pods that are left.
func left(w *testcluster.Cluster) string {
	var out []string
	for _, p := range w.LivePods() {
		out = append(out, p.Name)
	}
	slices.Sort(out)
	return strings.Join(out, " ")
}

// A pod whose device gets a taint is deleted at once, or when its claim no longer tolerates the
// taint. If the taint is removed before, the pod stays.
func TestDeviceTaints(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w := testcluster.New(t, testcluster.Options{NoMutationGuard: true})
		w.Lead(engine.Options{})
		w.AddNode("w1")
		w.CreateObject(deviceSlice(5))
		deviceUser(w, "at-once", "dev-0", 0)
		deviceUser(w, "later", "dev-1", 300)
		deviceUser(w, "never", "dev-2", -1)
		deviceUser(w, "healed", "dev-3", 300)
		deviceUser(w, "other", "dev-4", 0)
		time.Sleep(time.Minute)
		if got := left(w); got != "at-once healed later never other" {
			t.Fatalf("before: %s", got)
		}
		sicken(w, "dev-0", "dev-1", "dev-2", "dev-3")
		time.Sleep(10 * time.Second)
		if got := left(w); got != "healed later never other" {
			t.Errorf("at once: %s", got)
		}
		sicken(w, "dev-0", "dev-1", "dev-2")
		time.Sleep(280 * time.Second)
		if got := left(w); got != "healed later never other" {
			t.Errorf("after 290 s: %s", got)
		}
		time.Sleep(20 * time.Second)
		if got := left(w); got != "healed never other" {
			t.Errorf("after 310 s: %s", got)
		}
		events, err := client.List[*corev1.Event](w.Ctx, w.Admin, "default", metav1.ListOptions{})
		if err != nil {
			t.Fatal(err)
		}
		var told []string
		for _, e := range events {
			if e.Reason == "DeviceTaintManagerEviction" {
				told = append(told, e.InvolvedObject.Name+": "+e.Message)
			}
		}
		slices.Sort(told)
		if want := "[at-once: Marking for deletion Pod default/at-once later: Marking for deletion Pod " +
			"default/later]"; fmt.Sprint(told) != want {
			t.Errorf("events %v", told)
		}
		time.Sleep(10 * time.Minute)
		if got := left(w); got != "healed never other" {
			t.Errorf("in the end: %s", got)
		}
	})
}

// Regardless of lost calls, crashes and leader changes: pods of tainted devices are deleted, each
// with a reason. Other pods stay, including a new pod with the name of a deleted pod.
func TestDeviceTaintsUnderFailures(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w := testcluster.New(t, testcluster.Options{NoMutationGuard: true,
			ChangeController: testcluster.FailReconcilesAmong("device-taint-eviction-controller", 2, time.Millisecond)})
		settings := engine.Options{Resync: time.Second}
		stop := w.Lead(settings)
		defer func() { stop() }()
		w.AddNode("w1")
		const pods = 8
		w.CreateObject(deviceSlice(pods))
		for round := range 4 {
			var sick, well []string
			for i := range pods {
				name := fmt.Sprint("p", i)
				if round == 0 || (i+round)%2 == 0 {
					deviceUser(w, name, fmt.Sprint("dev-", i), int64(i%3))
				}
				if (i+round)%2 == 1 {
					sick = append(sick, fmt.Sprint("dev-", i))
				} else {
					well = append(well, name)
				}
			}
			sicken(w, sick...)
			for range 5 {
				time.Sleep(2 * time.Second)
				stop()
				stop = w.Lead(settings)
			}
			w.Eventually("pods of sick devices go", func() error {
				if got := left(w); got != strings.Join(well, " ") {
					return fmt.Errorf("round %d: %s are left, want %v", round, got, well)
				}
				return nil
			})
			sicken(w)
			for i := range pods { // the claims of the deleted pods
				if name := fmt.Sprint("p", i); !slices.Contains(well, name) {
					if err := client.Delete[*resourcev1.ResourceClaim](w.Ctx, w.Admin, "default", name,
						metav1.DeleteOptions{}); err != nil && !apierrors.IsNotFound(err) {
						t.Fatal(err)
					}
					w.Eventually("the claim goes", func() error {
						return testcluster.CheckGone[*resourcev1.ResourceClaim](w, name)
					})
				}
			}
		}
	})
}
