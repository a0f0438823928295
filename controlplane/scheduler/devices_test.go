package scheduler_test

import (
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/scheduler"
)

const gpu = "gpu.example.com"

func (b *bed) slice(node string, devices ...resourcev1.Device) {
	b.t.Helper()
	s := &resourcev1.ResourceSlice{ObjectMeta: metav1.ObjectMeta{Name: node + "-gpu"},
		Spec: resourcev1.ResourceSliceSpec{
			Driver: gpu, NodeName: &node, Devices: devices,
			Pool: resourcev1.ResourcePool{Name: node, Generation: 1, ResourceSliceCount: 1}}}
	if _, err := client.Create(b.ctx, b.client, s); err != nil {
		b.t.Fatal(err)
	}
}

func gpus(n int) []resourcev1.Device {
	var out []resourcev1.Device
	for i := range n {
		model := "small"
		if i%2 == 1 {
			model = "large"
		}
		out = append(out, resourcev1.Device{Name: fmt.Sprint("gpu-", i),
			Attributes: map[resourcev1.QualifiedName]resourcev1.DeviceAttribute{"model": {StringValue: &model}}})
	}
	return out
}

func (b *bed) gpuClass() {
	b.t.Helper()
	c := &resourcev1.DeviceClass{ObjectMeta: metav1.ObjectMeta{Name: gpu},
		Spec: resourcev1.DeviceClassSpec{Selectors: []resourcev1.DeviceSelector{
			{CEL: &resourcev1.CELDeviceSelector{Expression: `device.driver == "` + gpu + `"`}}}}}
	if _, err := client.Create(b.ctx, b.client, c); err != nil {
		b.t.Fatal(err)
	}
}

func (b *bed) deviceClaim(name string, count int64, selectors ...string) *resourcev1.ResourceClaim {
	b.t.Helper()
	want := &resourcev1.ExactDeviceRequest{DeviceClassName: gpu, Count: count,
		AllocationMode: resourcev1.DeviceAllocationModeExactCount}
	for _, s := range selectors {
		want.Selectors = append(want.Selectors,
			resourcev1.DeviceSelector{CEL: &resourcev1.CELDeviceSelector{Expression: s}})
	}
	c, err := client.Create(b.ctx, b.client,
		&resourcev1.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name},
			Spec: resourcev1.ResourceClaimSpec{Devices: resourcev1.DeviceClaim{
				Requests: []resourcev1.DeviceRequest{{Name: "r", Exactly: want}}}}})
	if err != nil {
		b.t.Fatal(err)
	}
	return c
}

func claiming(names ...string) func(*v1.Pod) {
	return func(pod *v1.Pod) {
		for i, name := range names {
			pod.Spec.ResourceClaims = append(pod.Spec.ResourceClaims,
				v1.PodResourceClaim{Name: fmt.Sprint("c", i), ResourceClaimName: &name})
		}
	}
}

func (b *bed) deviceClaimNow(name string) *resourcev1.ResourceClaim {
	b.t.Helper()
	c, err := client.Get[*resourcev1.ResourceClaim](b.ctx, b.client, "default", name)
	if err != nil {
		b.t.Fatal(err)
	}
	return c
}

// editClaim changes a claim's status until it is stored.
func (b *bed) editClaim(name string, change func(c *resourcev1.ResourceClaim)) {
	b.t.Helper()
	b.eventually("changing claim "+name, func() error {
		c := b.deviceClaimNow(name).DeepCopy()
		change(c)
		_, err := client.UpdateStatus(b.ctx, b.client, c)
		return err
	})
}

// A pod goes where the devices that it claims are, and its claim says which it has and for whom; what lacks them waits, with
// the node's lack in words, until there are some.
func TestPodsGetDevices(t *testing.T) {
	b := newBedOf(t, scheduler.Config{})
	b.gpuClass()
	b.node("w1", "8")
	b.node("w2", "8")
	b.slice("w2", gpus(2)...)
	b.deviceClaim("large", 1, `device.attributes["`+gpu+`"].model == "large"`)
	b.lead()
	b.pod("a", "100m", claiming("large"))
	b.awaitNode("a", "w2")
	c := b.deviceClaimNow("large")
	a := c.Status.Allocation
	if a == nil || len(a.Devices.Results) != 1 || a.Devices.Results[0].Device != "gpu-1" ||
		a.Devices.Results[0].Pool != "w2" || a.NodeSelector == nil ||
		len(c.Status.ReservedFor) != 1 || c.Status.ReservedFor[0].Name != "a" || len(c.Finalizers) != 1 {
		t.Fatalf("claim %+v", c)
	}
	b.pod("b", "100m", claiming("large")) // shares it
	b.awaitNode("b", "w2")
	if c := b.deviceClaimNow("large"); len(c.Status.ReservedFor) != 2 {
		t.Errorf("reserved for %v", c.Status.ReservedFor)
	}

	b.deviceClaim("two", 2)
	b.pod("c", "100m", claiming("two"))
	b.awaitReason("c", "0/2 nodes are available: 1 cannot allocate all claims: 0 of 2 devices of class "+
		"gpu.example.com (request r of resourceclaim two), "+
		"1 cannot allocate all claims: 1 of 2 devices of class gpu.example.com (request r of resourceclaim two). "+
		"preemption: 0/2 nodes are available: "+
		"2 Preemption is not helpful for scheduling.")
	b.slice("w1", gpus(2)...)
	b.awaitNode("c", "w1")

	b.pod("d", "100m", claiming("none"))
	b.awaitReason("d", `0/2 nodes are available: resourceclaim "none" not found. preemption: 0/2 nodes are available: `+
		`2 Preemption is not helpful for scheduling.`)
	b.deviceClaim("none", 1)
	b.awaitNode("d", "w2")
}

// A pod whose claim is made from a template waits until its status names it.
func TestPodsWaitForTheirClaims(t *testing.T) {
	b := newBedOf(t, scheduler.Config{})
	b.gpuClass()
	b.node("w1", "8")
	b.slice("w1", gpus(1)...)
	b.lead()
	template := "t"
	p := b.pod("a", "100m", func(pod *v1.Pod) {
		pod.Spec.ResourceClaims = []v1.PodResourceClaim{{Name: "g", ResourceClaimTemplateName: &template}}
	})
	b.eventually("the reason", func() error {
		for _, c := range b.get("a").Status.Conditions {
			if c.Type == v1.PodScheduled && strings.Contains(c.Message,
				`waiting for dynamic resource controller to create the resourceclaim "g" of the pod`) {
				return nil
			}
		}
		return errors.New("no such condition")
	})
	claim := b.deviceClaim("a-g", 1)
	b.eventually("naming the claim", func() error {
		next := b.get("a").DeepCopy()
		next.Status.ResourceClaimStatuses = []v1.PodResourceClaimStatus{{Name: "g", ResourceClaimName: &claim.Name}}
		_, err := client.UpdateStatus(b.ctx, b.client, next)
		return err
	})
	b.eventually("somebody else's claim is not taken", func() error {
		for _, c := range b.get("a").Status.Conditions {
			if strings.Contains(c.Message,
				"ResourceClaim default/a-g was not created for Pod default/a (Pod is not owner)") {
				return nil
			}
		}
		return errors.New("no such condition")
	})
	b.eventually("owning it", func() error {
		next := b.deviceClaimNow("a-g").DeepCopy()
		next.OwnerReferences = []metav1.OwnerReference{
			*metav1.NewControllerRef(p, v1.SchemeGroupVersion.WithKind("Pod"))}
		_, err := client.Update(b.ctx, b.client, next)
		return err
	})
	b.awaitNode("a", "w1")
}

// Where a binding fails, the pod's name goes out of its claim, and another attempt binds it with the same devices. Devices
// that no node of the pod reaches are given back, so that it gets others.
func TestDevicesAreGivenBack(t *testing.T) {
	b := newBedOf(t, scheduler.Config{})
	b.gpuClass()
	b.node("w1", "8")
	b.slice("w1", gpus(2)...)
	b.deviceClaim("one", 1)
	var failed atomic.Int32
	b.binds = func(string) error {
		if failed.Add(1) == 1 {
			if c := b.deviceClaimNow("one"); len(c.Status.ReservedFor) != 1 {
				t.Errorf("before the binding the claim says %+v", c.Status)
			}
			return apierrors.NewInternalError(errors.New("no"))
		}
		return nil
	}
	b.lead()
	b.pod("a", "100m", claiming("one"))
	b.awaitNode("a", "w1")
	if failed.Load() != 2 {
		t.Errorf("%d bindings", failed.Load())
	}

	b.node("w2", "8", func(n *v1.Node) { n.Labels["disk"] = "ssd" })
	b.slice("w2", gpus(1)...)
	b.deviceClaim("stuck", 1)
	b.editClaim("stuck", func(c *resourcev1.ResourceClaim) {
		c.Status.Allocation = b.deviceClaimNow("one").Status.Allocation.DeepCopy()
		c.Status.Allocation.Devices.Results[0].Device = "gpu-1"
	})
	b.pod("b", "100m", claiming("stuck"), func(pod *v1.Pod) {
		pod.Spec.NodeSelector = map[string]string{"disk": "ssd"}
	})
	b.awaitNode("b", "w2")
	if c := b.deviceClaimNow("stuck"); c.Status.Allocation.Devices.Results[0].Pool != "w2" {
		t.Errorf("claim %+v", c.Status)
	}
}

// A pod is not bound before drivers have made its devices ready, and goes elsewhere when they say that they cannot.
func TestDevicesBecomeReady(t *testing.T) {
	b := newBedOf(t, scheduler.Config{})
	b.gpuClass()
	b.node("w1", "8")
	slow := gpus(1)
	slow[0].BindingConditions, slow[0].BindingFailureConditions = []string{"Attached"}, []string{"Broken"}
	b.slice("w1", slow...)
	b.deviceClaim("one", 1)
	b.lead()
	b.pod("a", "100m", claiming("one"))
	set := func(condition string) {
		b.eventually("the devices", func() error {
			if c := b.deviceClaimNow("one"); c.Status.Allocation == nil ||
				c.Status.Allocation.AllocationTimestamp == nil {
				return fmt.Errorf("%+v", c.Status)
			}
			return nil
		})
		b.editClaim("one", func(c *resourcev1.ResourceClaim) {
			c.Status.Devices = []resourcev1.AllocatedDeviceStatus{{Driver: gpu, Pool: "w1", Device: "gpu-0",
				Conditions: []metav1.Condition{
					{Type: condition, Status: metav1.ConditionTrue, Reason: "r",
						LastTransitionTime: metav1.Time{Time: time.Unix(1, 0)}}}}}
		})
	}
	set("Broken")
	b.eventually("the devices are given back", func() error {
		if c := b.deviceClaimNow("one"); len(c.Status.Devices) > 0 {
			return fmt.Errorf("%+v", c.Status)
		}
		return nil
	})
	if node := b.get("a").Spec.NodeName; node != "" {
		t.Fatalf("on %s", node)
	}
	set("Attached")
	b.awaitNode("a", "w1")
}

// A pod waits for its drivers as long as its profile says, and then goes elsewhere.
func TestDevicesAreAwaitedForATime(t *testing.T) {
	b := newBedOf(t, scheduler.Config{Settings: settings(t,
		"profiles: [{pluginConfig: [{name: DynamicResources, args: {bindingTimeout: 1s}}]}]")})
	b.gpuClass()
	b.node("w1", "8", func(n *v1.Node) { n.Labels["disk"] = "ssd" })
	slow := gpus(1)
	slow[0].BindingConditions, slow[0].BindingFailureConditions = []string{"Attached"}, []string{"Broken"}
	b.slice("w1", slow...)
	b.deviceClaim("one", 1)
	b.lead()
	b.pod("a", "100m", claiming("one"))
	b.eventually("the pod says what it waited for", func() error {
		for _, c := range b.get("a").Status.Conditions {
			if c.Type == v1.PodScheduled && strings.Contains(c.Message, "waiting for devices to become ready") {
				return nil
			}
		}
		return fmt.Errorf("conditions %+v", b.get("a").Status.Conditions)
	})
	if node := b.get("a").Spec.NodeName; node != "" {
		t.Errorf("on %s", node)
	}
}

// Many pods, few devices, leaders that come and go: no device is given to two claims, and all devices find a user.
func TestNoDeviceTwice(t *testing.T) {
	b := newBedOf(t, scheduler.Config{})
	b.gpuClass()
	const nodes, each, pods = 4, 3, 20
	for i := range nodes {
		name := fmt.Sprint("w", i)
		b.node(name, "64")
		b.slice(name, gpus(each)...)
	}
	var tries atomic.Int64
	b.binds = func(string) error {
		if tries.Add(1)%5 == 0 {
			return apierrors.NewInternalError(errors.New("no"))
		}
		return nil
	}
	depose := b.lead()
	for i := range pods {
		name := fmt.Sprint("c", i)
		b.deviceClaim(name, 1)
		b.pod(fmt.Sprint("p", i), "1m", claiming(name))
		if i%7 == 6 {
			depose()
			depose = b.lead()
		}
	}
	// Pods are read first, and then all claims at once: the devices of a pod that is bound change no more.
	check := func() (bound int) {
		nodeOf := map[string]string{}
		for i := range pods {
			nodeOf[fmt.Sprint("c", i)] = b.get(fmt.Sprint("p", i)).Spec.NodeName
		}
		claims, err := client.List[*resourcev1.ResourceClaim](b.ctx, b.client, "default", metav1.ListOptions{})
		if err != nil {
			t.Fatal(err)
		}
		seen := map[string]string{}
		for _, c := range claims {
			if c.Status.Allocation == nil {
				continue
			}
			r := c.Status.Allocation.Devices.Results[0]
			if other := seen[r.Pool+"/"+r.Device]; other != "" {
				t.Fatalf("device %s/%s was given to %s and %s", r.Pool, r.Device, other, c.Name)
			}
			seen[r.Pool+"/"+r.Device] = c.Name
			if node := nodeOf[c.Name]; node != "" {
				if bound++; node != r.Pool {
					t.Fatalf("the pod of %s is on %s, its device on %s", c.Name, node, r.Pool)
				}
			}
		}
		return bound
	}
	b.eventually("all devices are used", func() error {
		if n := check(); n != nodes*each {
			return fmt.Errorf("%d of %d", n, nodes*each)
		}
		return nil
	})
}
