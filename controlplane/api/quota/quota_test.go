package quota

import (
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"keelson.dev/keelson/controlplane/api"
)

func list(text string) corev1.ResourceList {
	out := corev1.ResourceList{}
	for _, pair := range strings.Fields(text) {
		name, value, _ := strings.Cut(pair, "=")
		out[corev1.ResourceName(name)] = resource.MustParse(value)
	}
	return out
}

var now = time.Unix(10000, 0)

func pod(change func(p *corev1.Pod)) *corev1.Pod {
	p :=
		&corev1.Pod{Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "c",
			Resources: corev1.ResourceRequirements{
				Requests: list("cpu=1 memory=1Gi"), Limits: list("cpu=2")}}}}}
	if change != nil {
		change(p)
	}
	return p
}

// What objects count for.
func TestUsage(t *testing.T) {
	const whole = "count/pods=1,cpu=1,limits.cpu=2,memory=1Gi,pods=1,requests.cpu=1,requests.memory=1Gi"
	slow := "slow"
	no := false
	service := func(kind corev1.ServiceType, gets *bool, nodePorts ...int32) *corev1.Service {
		s := &corev1.Service{Spec: corev1.ServiceSpec{Type: kind, AllocateLoadBalancerNodePorts: gets}}
		for _, p := range nodePorts {
			s.Spec.Ports = append(s.Spec.Ports, corev1.ServicePort{NodePort: p})
		}
		return s
	}
	claim := func(size, has string, class *string) *corev1.PersistentVolumeClaim {
		return &corev1.PersistentVolumeClaim{
			Spec: corev1.PersistentVolumeClaimSpec{StorageClassName: class,
				Resources: corev1.VolumeResourceRequirements{Requests: list("storage=" + size)}},
			Status: corev1.PersistentVolumeClaimStatus{AllocatedResources: list(has)}}
	}
	for _, c := range []struct {
		of   string
		o    api.Object
		want string
	}{
		{"pods", pod(nil), whole},
		{"pods", pod(func(p *corev1.Pod) {
			p.Spec.Overhead = list("cpu=100m memory=1Gi ephemeral-storage=1Mi")
		}), "count/pods=1,cpu=1100m," +
			"ephemeral-storage=1Mi,limits.cpu=2100m,memory=2Gi,pods=1,requests.cpu=1100m," +
			"requests.ephemeral-storage=1Mi,requests.memory=2Gi"},
		{"pods", pod(func(p *corev1.Pod) { p.Status.Phase = corev1.PodFailed }), "count/pods=1"},
		{"pods", pod(func(p *corev1.Pod) { ending(p, now.Add(-time.Hour), 30) }), "count/pods=1"},
		{"pods", pod(func(p *corev1.Pod) { ending(p, now, 30) }), whole},
		{"pods", pod(func(p *corev1.Pod) {
			p.Spec.Containers[0].Resources = corev1.ResourceRequirements{
				Requests: list("example.com/gpu=2 hugepages-2Mi=4Mi ephemeral-storage=1Gi")}
		}),
			"count/pods=1,ephemeral-storage=1Gi,hugepages-2Mi=4Mi,pods=1,requests.ephemeral-storage=1Gi," +
				"requests.example.com/gpu=2,requests.hugepages-2Mi=4Mi"},
		{"services", service(corev1.ServiceTypeClusterIP, nil, 0),
			"count/services=1,services=1,services.loadbalancers=0,services.nodeports=0"},
		{"services", service(corev1.ServiceTypeNodePort, nil, 1, 2),
			"count/services=1,services=1,services.loadbalancers=0,services.nodeports=2"},
		{"services", service(corev1.ServiceTypeLoadBalancer, nil, 0, 0),
			"count/services=1,services=1,services.loadbalancers=1,services.nodeports=2"},
		{"services", service(corev1.ServiceTypeLoadBalancer, &no, 0, 5),
			"count/services=1,services=1,services.loadbalancers=1,services.nodeports=1"},
		{"persistentvolumeclaims", claim("1Gi", "", nil),
			"count/persistentvolumeclaims=1,persistentvolumeclaims=1,requests.storage=1Gi"},
		{"persistentvolumeclaims", claim("1Gi", "storage=2Gi", &slow),
			"count/persistentvolumeclaims=1,persistentvolumeclaims=1,requests.storage=2Gi," +
				"slow.storageclass.storage.k8s.io/persistentvolumeclaims=1," +
				"slow.storageclass.storage.k8s.io/requests.storage=2Gi"},
		{"resourceclaims.resource.k8s.io", devicesOf(ask("gpu", 2), ask("gpu", 3), ask("nic", 0)),
			"count/resourceclaims.resource.k8s.io=1," +
				"gpu.deviceclass.resource.k8s.io/devices=5,nic.deviceclass.resource.k8s.io/devices=32"},
		{"resourceclaims.resource.k8s.io", devicesOf(ask("gpu", 1), anyOf(ask("gpu", 2), ask("gpu", 4), ask("nic", 3))),
			"count/resourceclaims.resource.k8s.io=1," +
				"gpu.deviceclass.resource.k8s.io/devices=5,nic.deviceclass.resource.k8s.io/devices=3"},
		{"configmaps", &corev1.ConfigMap{}, "configmaps=1,count/configmaps=1"},
		{"leases.coordination.k8s.io", &corev1.ConfigMap{}, "count/leases.coordination.k8s.io=1"},
	} {
		if got := Format(ObjectUsage(schema.ParseGroupResource(c.of), c.o, now)); got != c.want {
			t.Errorf("%s: %s\nwant %s", c.of, got, c.want)
		}
	}
}

// ask returns a request for n devices of a class; 0 = all devices.
func ask(class string, n int64) resourcev1.DeviceRequest {
	mode := resourcev1.DeviceAllocationModeExactCount
	if n == 0 {
		mode = resourcev1.DeviceAllocationModeAll
	}
	return resourcev1.DeviceRequest{Exactly: &resourcev1.ExactDeviceRequest{DeviceClassName: class,
		AllocationMode: mode, Count: n}}
}

// anyOf returns a request for one of several alternatives.
func anyOf(list ...resourcev1.DeviceRequest) (r resourcev1.DeviceRequest) {
	for _, one := range list {
		r.FirstAvailable = append(r.FirstAvailable, resourcev1.DeviceSubRequest{
			DeviceClassName: one.Exactly.DeviceClassName, AllocationMode: one.Exactly.AllocationMode,
			Count: one.Exactly.Count})
	}
	return r
}

func devicesOf(list ...resourcev1.DeviceRequest) *resourcev1.ResourceClaim {
	return &resourcev1.ResourceClaim{Spec: resourcev1.ResourceClaimSpec{
		Devices: resourcev1.DeviceClaim{Requests: list}}}
}

func ending(p *corev1.Pod, at time.Time, grace int64) {
	p.DeletionTimestamp, p.DeletionGracePeriodSeconds = &metav1.Time{Time: at}, &grace
}

// Which pods and claims are in which scope, by each operator; other objects are in none.
func TestScopes(t *testing.T) {
	soon, gold := int64(5), "gold"
	best := pod(func(p *corev1.Pod) { p.Spec.Containers[0].Resources = corev1.ResourceRequirements{} })
	limited := pod(func(p *corev1.Pod) { p.Spec.ActiveDeadlineSeconds = &soon })
	high := pod(func(p *corev1.Pod) { p.Spec.PriorityClassName = "high" })
	far := pod(func(p *corev1.Pod) {
		p.Spec.Affinity =
			&corev1.Affinity{PodAntiAffinity: &corev1.PodAntiAffinity{
				PreferredDuringSchedulingIgnoredDuringExecution: []corev1.WeightedPodAffinityTerm{
					{PodAffinityTerm: corev1.PodAffinityTerm{Namespaces: []string{"other"}}}}}}
	})
	golden := &corev1.PersistentVolumeClaim{Spec: corev1.PersistentVolumeClaimSpec{VolumeAttributesClassName: &gold}}
	const in, not, exists, absent = corev1.ScopeSelectorOpIn, corev1.ScopeSelectorOpNotIn, corev1.ScopeSelectorOpExists,
		corev1.ScopeSelectorOpDoesNotExist
	for _, c := range []struct {
		scope  corev1.ResourceQuotaScope
		op     corev1.ScopeSelectorOperator
		values string
		o      api.Object
		want   bool
	}{
		{corev1.ResourceQuotaScopeTerminating, exists, "", limited, true},
		{corev1.ResourceQuotaScopeTerminating, exists, "", best, false},
		{corev1.ResourceQuotaScopeNotTerminating, exists, "", limited, false},
		{corev1.ResourceQuotaScopeNotTerminating, exists, "", best, true},
		{corev1.ResourceQuotaScopeBestEffort, exists, "", best, true},
		{corev1.ResourceQuotaScopeBestEffort, exists, "", high, false},
		{corev1.ResourceQuotaScopeNotBestEffort, exists, "", best, false},
		{corev1.ResourceQuotaScopeNotBestEffort, exists, "", high, true},
		{corev1.ResourceQuotaScopePriorityClass, exists, "", high, true},
		{corev1.ResourceQuotaScopePriorityClass, exists, "", best, false},
		{corev1.ResourceQuotaScopePriorityClass, absent, "", best, true},
		{corev1.ResourceQuotaScopePriorityClass, absent, "", high, false},
		{corev1.ResourceQuotaScopePriorityClass, in, "low high", high, true},
		{corev1.ResourceQuotaScopePriorityClass, in, "low", high, false},
		{corev1.ResourceQuotaScopePriorityClass, in, "low", best, false},
		{corev1.ResourceQuotaScopePriorityClass, not, "low", high, true},
		{corev1.ResourceQuotaScopePriorityClass, not, "high", high, false},
		{corev1.ResourceQuotaScopePriorityClass, not, "high", best, true},
		{corev1.ResourceQuotaScopeCrossNamespacePodAffinity, exists, "", far, true},
		{corev1.ResourceQuotaScopeCrossNamespacePodAffinity, exists, "", high, false},
		{corev1.ResourceQuotaScopeVolumeAttributesClass, exists, "", golden, true},
		{corev1.ResourceQuotaScopeVolumeAttributesClass, in, "gold", golden, true},
		{corev1.ResourceQuotaScopeVolumeAttributesClass, in, "gold", &corev1.PersistentVolumeClaim{}, false},
		{corev1.ResourceQuotaScopeVolumeAttributesClass, exists, "", high, false},
		{corev1.ResourceQuotaScopeBestEffort, exists, "", golden, false},
		{corev1.ResourceQuotaScopeNotTerminating, exists, "", &corev1.ConfigMap{}, false},
	} {
		of := schema.GroupResource{Resource: "configmaps"}
		switch c.o.(type) {
		case *corev1.Pod:
			of = Pods
		case *corev1.PersistentVolumeClaim:
			of = Claims
		}
		spec := &corev1.ResourceQuotaSpec{Hard: list("count/" + of.Resource + "=1"),
			ScopeSelector: &corev1.ScopeSelector{
				MatchExpressions: []corev1.ScopedResourceSelectorRequirement{{ScopeName: c.scope, Operator: c.op,
					Values: strings.Fields(c.values)}}}}
		if got := len(ChargedUsage(spec, of, c.o, now)) > 0; got != c.want {
			t.Errorf("%s %s %q, %T: %v", c.scope, c.op, c.values, c.o, got)
		}
		if c.op == exists {
			plain := &corev1.ResourceQuotaSpec{Hard: spec.Hard, Scopes: []corev1.ResourceQuotaScope{c.scope}}
			if got := len(ChargedUsage(plain, of, c.o, now)) > 0; got != c.want {
				t.Errorf("scope %s, %T: %v", c.scope, c.o, got)
			}
		}
	}
}

// F129: a pod with resources of its own counts with these, and with its overhead. While it is resized,
// it counts with the most of what it requests, was allocated and has.
func TestUsageOfPodResources(t *testing.T) {
	sized := func(status string, reason string) *corev1.Pod {
		return pod(func(p *corev1.Pod) {
			p.Spec.Resources = &corev1.ResourceRequirements{Requests: list("cpu=3"), Limits: list("cpu=4 memory=8Gi")}
			p.Spec.Overhead = list("cpu=100m")
			if status != "" {
				p.Status.AllocatedResources = list(status)
				p.Status.Resources = &corev1.ResourceRequirements{Requests: list(status), Limits: list("cpu=6")}
			}
			if reason != "" {
				p.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodResizePending, Reason: reason}}
			}
		})
	}
	for _, c := range []struct {
		name string
		pod  *corev1.Pod
		want string
	}{
		{"requested", sized("", ""), "limits.cpu=4100m requests.cpu=3100m requests.memory=1Gi"},
		{"was larger", sized("cpu=5 memory=1Gi", ""), "limits.cpu=6100m requests.cpu=5100m requests.memory=1Gi"},
		{"was smaller", sized("cpu=1 memory=1Gi", ""), "limits.cpu=6100m requests.cpu=3100m requests.memory=1Gi"},
		{"is never granted", sized("cpu=1 memory=1Gi", corev1.PodReasonInfeasible),
			"limits.cpu=6100m requests.cpu=1100m requests.memory=1Gi"},
	} {
		usage := corev1.ResourceList{}
		addPod(usage, c.pod, now)
		var parts []string
		for _, name := range []corev1.ResourceName{"limits.cpu", "requests.cpu", "requests.memory"} {
			q := usage[name]
			parts = append(parts, string(name)+"="+q.String())
		}
		if got := strings.Join(parts, " "); got != c.want {
			t.Errorf("%s: %s, want %s", c.name, got, c.want)
		}
	}
}

// What a pod has to state where a quota bounds it.
func TestUnstated(t *testing.T) {
	bare := pod(func(p *corev1.Pod) {
		p.Spec.InitContainers = []corev1.Container{{Name: "b"}}
		p.Spec.Containers = append(p.Spec.Containers, corev1.Container{Name: "a"})
	})
	level := pod(func(p *corev1.Pod) {
		p.Spec.Containers = []corev1.Container{{Name: "a"}}
		p.Spec.Resources = &corev1.ResourceRequirements{Requests: list("cpu=1")}
	})
	for _, c := range []struct {
		hard string
		pod  *corev1.Pod
		want string
	}{
		{"requests.cpu=1", pod(nil), ""},
		{"limits.memory=1 requests.cpu=1", pod(nil), "limits.memory for: c"},
		{"limits.cpu=1 memory=1", bare, "limits.cpu for: a,b; memory for: a,b"},
		{"requests.ephemeral-storage=1 requests.example.com/gpu=1 pods=1", bare, ""},
		{"requests.cpu=1", level, ""},
	} {
		if got := DescribeUnset(&corev1.ResourceQuotaSpec{Hard: list(c.hard)}, c.pod); got != c.want {
			t.Errorf("%s: %q, want %q", c.hard, got, c.want)
		}
	}
}

// A status is complete for the current spec, or must be recounted. Names for which nothing is
// counted need no usage.
func TestCounted(t *testing.T) {
	known := func(of schema.GroupResource) bool { return of.Group != "gone.example" }
	for _, c := range []struct {
		hard, shown, used string
		want              bool
	}{
		{"pods=1", "", "", false}, {"pods=1", "pods=1", "", false}, {"pods=1", "pods=1", "pods=0", true},
		{"pods=2", "pods=1", "pods=0", false},
		{"count/a.gone.example=1", "count/a.gone.example=1", "", true},
		{"count/a.b.example=1", "count/a.b.example=1", "", false},
		{"example.com/x=1", "example.com/x=1", "", true},
	} {
		q := &corev1.ResourceQuota{Spec: corev1.ResourceQuotaSpec{Hard: list(c.hard)},
			Status: corev1.ResourceQuotaStatus{Hard: list(c.shown), Used: list(c.used)}}
		if got := IsStatusComplete(q, known); got != c.want {
			t.Errorf("%+v: %v", c, got)
		}
	}
}
