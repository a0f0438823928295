package registry

import (
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/kinds"
)

// richPod returns a pod with lists of every type: keyed, set, atomic, with and without defaulted
// keys.
func richPod() *corev1.Pod {
	p := pod("default", "rich")
	p.GenerateName, p.Finalizers = "ri", []string{"example.org/a", "example.org/b"}
	p.Annotations = map[string]string{"x": "", "y": "z"}
	p.OwnerReferences = []metav1.OwnerReference{{APIVersion: "apps/v1", Kind: "ReplicaSet", Name: "r", UID: "u",
		Controller: new(true)}}
	c := &p.Spec.Containers[0]
	c.Resources = corev1.ResourceRequirements{Requests: corev1.ResourceList{"cpu": resource.MustParse("100m"),
		"memory": resource.MustParse("1Gi")}}
	c.Ports = append(c.Ports, corev1.ContainerPort{ContainerPort: 53, Protocol: corev1.ProtocolUDP})
	c.VolumeMounts = []corev1.VolumeMount{{Name: "v", MountPath: "/v"}, {Name: "v", MountPath: "/w", SubPath: "s"}}
	c.ReadinessProbe =
		&corev1.Probe{ProbeHandler: corev1.ProbeHandler{HTTPGet: &corev1.HTTPGetAction{Path: "/",
			Port: intstr.FromString("http")}}}
	c.Command, c.Args = []string{"a", "b"}, []string{}
	c.SecurityContext = &corev1.SecurityContext{}
	p.Spec.Containers = append(p.Spec.Containers, corev1.Container{Name: "side", Image: "x"})
	p.Spec.Volumes = []corev1.Volume{{Name: "v",
		VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}}}
	p.Spec.Tolerations = []corev1.Toleration{{Key: "k", Operator: corev1.TolerationOpExists}}
	p.Spec.NodeSelector = map[string]string{"a": "b"}
	p.Spec.ImagePullSecrets = []corev1.LocalObjectReference{{Name: "s"}}
	p.Spec.TopologySpreadConstraints = []corev1.TopologySpreadConstraint{{TopologyKey: "zone",
		WhenUnsatisfiable: corev1.DoNotSchedule, MaxSkew: 1}}
	p.Status = corev1.PodStatus{Phase: corev1.PodPending, QOSClass: corev1.PodQOSBurstable,
		Conditions: []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionFalse,
			LastTransitionTime: metav1.Unix(1_700_000_000, 0)}},
		PodIPs: []corev1.PodIP{{IP: "10.0.0.1"}, {IP: "fd00::1"}}}
	return p
}

// The fast path for new objects gives exactly the result of the field manager.
func TestOwnedFieldsOfNewObjects(t *testing.T) {
	r := New(nil, kinds.All())
	meta := metav1.ObjectMeta{Namespace: "default", Name: "a", UID: "u", Generation: 1,
		CreationTimestamp: metav1.Unix(1_700_000_000, 0), Labels: map[string]string{"l": "1"}}
	twice := richPod()
	twice.Spec.Containers[0].Env = append(twice.Spec.Containers[0].Env, twice.Spec.Containers[0].Env[0])
	for name, obj := range map[string]api.Object{
		"pod":         pod("default", "p"),
		"rich pod":    richPod(),
		"duplicates":  twice,
		"bare object": &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "a"}},
		"config map": &corev1.ConfigMap{ObjectMeta: meta, Data: map[string]string{"a": "1", "b": ""},
			BinaryData: map[string][]byte{"c": {1}}, Immutable: new(false)},
		"empty maps": &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{}},
			Data: map[string]string{}},
		"secret":     &corev1.Secret{ObjectMeta: meta, Type: "Opaque", Data: map[string][]byte{"k": []byte("v")}},
		"deployment": deployment("web", 3),
		"service": &corev1.Service{ObjectMeta: meta,
			Spec: corev1.ServiceSpec{ClusterIPs: []string{"10.96.0.9"},
				Ports:    []corev1.ServicePort{{Port: 80, TargetPort: intstr.FromInt32(8080)}},
				Selector: map[string]string{"a": "b"}}},
		"namespace": &corev1.Namespace{ObjectMeta: meta,
			Spec:   corev1.NamespaceSpec{Finalizers: []corev1.FinalizerName{"kubernetes"}},
			Status: corev1.NamespaceStatus{Phase: "Active"}},
		"node": &corev1.Node{ObjectMeta: meta,
			Spec: corev1.NodeSpec{PodCIDRs: []string{"10.0.0.0/24"},
				Taints: []corev1.Taint{{Key: "k", Effect: "NoSchedule"}}},
			Status: corev1.NodeStatus{Capacity: corev1.ResourceList{"cpu": resource.MustParse("2")},
				Addresses: []corev1.NodeAddress{{Type: "InternalIP", Address: "10.0.0.1"}}}},
		"cluster role": &rbacv1.ClusterRole{ObjectMeta: meta,
			Rules: []rbacv1.PolicyRule{{Verbs: []string{"get"}, Resources: []string{"pods"}}}},
		"slice": &discoveryv1.EndpointSlice{ObjectMeta: meta, AddressType: "IPv4",
			Endpoints: []discoveryv1.Endpoint{{Addresses: []string{"10.0.0.1"}}},
			Ports:     []discoveryv1.EndpointPort{{Port: new(int32(80))}}},
		"replica set": &appsv1.ReplicaSet{ObjectMeta: meta,
			Spec: appsv1.ReplicaSetSpec{Template: corev1.PodTemplateSpec{Spec: richPod().Spec}}},
	} {
		t.Run(name, func(t *testing.T) {
			k := r.kinds.ByType(obj)
			k.SetTypeMeta(obj)
			fm, err := fieldManager(r, k, "")
			if err != nil {
				t.Fatal(err)
			}
			empty := k.Type.New()
			k.SetTypeMeta(empty)
			want := fm.UpdateNoErrors(empty, obj.DeepCopyObject(), "m").(api.Object).GetManagedFields()

			w := &write{served: r.cache.ByKind(k), registry: r,
				req: &api.Request{Kind: k, User: api.User{Name: "alice"}}, manager: "m"}
			w.fieldOwners().trackCreate(obj)
			got := obj.GetManagedFields()
			if len(got) != len(want) {
				t.Fatalf("%d entries, the field manager gives %d: %v", len(got), len(want), want)
			}
			for i := range got {
				a, b := got[i], want[i]
				if a.Manager != b.Manager || a.Operation != b.Operation || a.APIVersion != b.APIVersion ||
					a.FieldsType != b.FieldsType || a.Subresource != b.Subresource {
					t.Fatalf("entry %+v, want %+v", a, b)
				}
				if string(a.FieldsV1.Raw) != string(b.FieldsV1.Raw) {
					t.Fatalf("fields\n%s\nwant\n%s", a.FieldsV1.Raw, b.FieldsV1.Raw)
				}
			}
		})
	}
	if n := newObjectTracker(r, r.kinds.ByType(richPod())); n == nil {
		t.Fatal("pods have no schema")
	} else if _, err := n.Entries(richPod(), "m", "v1", metav1.Time{}); err != nil {
		t.Fatalf("the short cut does not take a pod: %v", err)
	}
}
