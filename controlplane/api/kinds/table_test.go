package kinds_test

import (
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/kinds"
)

// prefixes are the storage prefixes of all kinds, under which existing clusters have their objects.
// Lines may be added, but an existing line must never change.
const prefixes = `/registry/apiservices/ apiregistration.k8s.io/v1, Kind=APIService
/registry/certificatesigningrequests/ certificates.k8s.io/v1, Kind=CertificateSigningRequest
/registry/clusterrolebindings/ rbac.authorization.k8s.io/v1, Kind=ClusterRoleBinding
/registry/clusterroles/ rbac.authorization.k8s.io/v1, Kind=ClusterRole
/registry/clustertrustbundles/ certificates.k8s.io/v1, Kind=ClusterTrustBundle
/registry/configmaps/ /v1, Kind=ConfigMap
/registry/controllerrevisions/ apps/v1, Kind=ControllerRevision
/registry/cronjobs/ batch/v1, Kind=CronJob
/registry/csidrivers/ storage.k8s.io/v1, Kind=CSIDriver
/registry/csinodes/ storage.k8s.io/v1, Kind=CSINode
/registry/csistoragecapacities/ storage.k8s.io/v1, Kind=CSIStorageCapacity
/registry/customresourcedefinitions/ apiextensions.k8s.io/v1, Kind=CustomResourceDefinition
/registry/daemonsets/ apps/v1, Kind=DaemonSet
/registry/deployments/ apps/v1, Kind=Deployment
/registry/deviceclasses/ resource.k8s.io/v1, Kind=DeviceClass
/registry/endpoints/ /v1, Kind=Endpoints
/registry/endpointslices/ discovery.k8s.io/v1, Kind=EndpointSlice
/registry/events/ /v1, Kind=Event
/registry/flowschemas/ flowcontrol.apiserver.k8s.io/v1, Kind=FlowSchema
/registry/horizontalpodautoscalers/ autoscaling/v2, Kind=HorizontalPodAutoscaler
/registry/ingressclasses/ networking.k8s.io/v1, Kind=IngressClass
/registry/ingresses/ networking.k8s.io/v1, Kind=Ingress
/registry/ipaddresses/ networking.k8s.io/v1, Kind=IPAddress
/registry/jobs/ batch/v1, Kind=Job
/registry/leases/ coordination.k8s.io/v1, Kind=Lease
/registry/limitranges/ /v1, Kind=LimitRange
/registry/mutatingadmissionpolicies/ admissionregistration.k8s.io/v1, Kind=MutatingAdmissionPolicy
/registry/mutatingadmissionpolicybindings/ admissionregistration.k8s.io/v1, Kind=MutatingAdmissionPolicyBinding
/registry/mutatingwebhookconfigurations/ admissionregistration.k8s.io/v1, Kind=MutatingWebhookConfiguration
/registry/namespaces/ /v1, Kind=Namespace
/registry/networkpolicies/ networking.k8s.io/v1, Kind=NetworkPolicy
/registry/nodes/ /v1, Kind=Node
/registry/persistentvolumeclaims/ /v1, Kind=PersistentVolumeClaim
/registry/persistentvolumes/ /v1, Kind=PersistentVolume
/registry/poddisruptionbudgets/ policy/v1, Kind=PodDisruptionBudget
/registry/podgroups/ scheduling.k8s.io/v1beta1, Kind=PodGroup
/registry/pods/ /v1, Kind=Pod
/registry/podtemplates/ /v1, Kind=PodTemplate
/registry/priorityclasses/ scheduling.k8s.io/v1, Kind=PriorityClass
/registry/prioritylevelconfigurations/ flowcontrol.apiserver.k8s.io/v1, Kind=PriorityLevelConfiguration
/registry/replicasets/ apps/v1, Kind=ReplicaSet
/registry/replicationcontrollers/ /v1, Kind=ReplicationController
/registry/resourceclaims/ resource.k8s.io/v1, Kind=ResourceClaim
/registry/resourceclaimtemplates/ resource.k8s.io/v1, Kind=ResourceClaimTemplate
/registry/resourcequotas/ /v1, Kind=ResourceQuota
/registry/resourceslices/ resource.k8s.io/v1, Kind=ResourceSlice
/registry/rolebindings/ rbac.authorization.k8s.io/v1, Kind=RoleBinding
/registry/roles/ rbac.authorization.k8s.io/v1, Kind=Role
/registry/runtimeclasses/ node.k8s.io/v1, Kind=RuntimeClass
/registry/secrets/ /v1, Kind=Secret
/registry/serviceaccounts/ /v1, Kind=ServiceAccount
/registry/servicecidrs/ networking.k8s.io/v1, Kind=ServiceCIDR
/registry/services/ /v1, Kind=Service
/registry/statefulsets/ apps/v1, Kind=StatefulSet
/registry/storageclasses/ storage.k8s.io/v1, Kind=StorageClass
/registry/validatingadmissionpolicies/ admissionregistration.k8s.io/v1, Kind=ValidatingAdmissionPolicy
/registry/validatingadmissionpolicybindings/ admissionregistration.k8s.io/v1, Kind=ValidatingAdmissionPolicyBinding
/registry/validatingwebhookconfigurations/ admissionregistration.k8s.io/v1, Kind=ValidatingWebhookConfiguration
/registry/volumeattachments/ storage.k8s.io/v1, Kind=VolumeAttachment
/registry/volumeattributesclasses/ storage.k8s.io/v1, Kind=VolumeAttributesClass
/registry/workloads/ scheduling.k8s.io/v1beta1, Kind=Workload
`

// Where objects lie and in which version they are written does not depend on what else is registered, or when.
func TestPrefixesStay(t *testing.T) {
	lines := func(list []*api.Kind) string {
		var out []string
		for _, k := range api.NewKinds(list...).Table().Stored() {
			out = append(out, fmt.Sprintf("%s %s\n", k.Storage.Prefix, k.Storage.Hub.GVK))
		}
		slices.Sort(out)
		return strings.Join(out, "")
	}
	all := kinds.All().All()
	back := slices.Clone(kinds.All().All())
	slices.Reverse(back)
	if got := lines(all); got != prefixes {
		t.Errorf("the storages are\n%s", got)
	}
	if got := lines(back); got != prefixes {
		t.Errorf("registered in reverse, they are\n%s", got)
	}
}

// The operations of each kind do what reflection over its fields would.
func TestOps(t *testing.T) {
	for _, k := range kinds.All().Table().Stored() {
		obj := k.Type.New()
		obj.SetName("a")
		obj.SetLabels(map[string]string{"a": "b"})
		status := reflect.ValueOf(obj).Elem().FieldByName("Status")
		if status.IsValid() != (k.Type.Ops.SetStatus != nil) {
			t.Errorf("%s: the type has a status: %v, the kind: %v", k.Resource, status.IsValid(),
				k.Type.Ops.SetStatus != nil)
			continue
		}
		c := k.Type.Ops.Shallow(obj)
		if c == obj || !reflect.DeepEqual(c, obj) {
			t.Errorf("%s: the copy is %v", k.Resource, c)
		}
		c.SetName("other")
		other := k.Type.New()
		k.Type.Ops.Assign(other, obj)
		if obj.GetName() != "a" || !reflect.DeepEqual(other, obj) {
			t.Errorf("%s: copies are not apart: %v, %v", k.Resource, obj, other)
		}
		k.SetTypeMeta(obj)
		items := reflect.ValueOf(k.Type.Ops.List([]api.Object{obj, c})).Elem().FieldByName("Items")
		if items.Len() != 2 || items.Index(0).FieldByName("Kind").String() != "" ||
			obj.GetObjectKind().GroupVersionKind() != k.GVK {
			t.Errorf("%s: the list is %v", k.Resource, items)
		}
		if bare := k.DesiredState(obj); !reflect.DeepEqual(bare, k.Type.New()) || obj.GetName() != "a" {
			t.Errorf("%s: nothing is desired, bare is %v", k.Resource, bare)
		}
	}
	from, to := &corev1.Pod{}, &corev1.Pod{Spec: corev1.PodSpec{NodeName: "n"},
		Status: corev1.PodStatus{Phase: corev1.PodPending}}
	from.Status = corev1.PodStatus{Phase: corev1.PodRunning}
	pods := kinds.All().ByType(to)
	if pods.Type.Ops.SetStatus(to, from); to.Status.Phase != corev1.PodRunning || to.Spec.NodeName != "n" {
		t.Errorf("got %+v", to)
	}
	if bare := pods.DesiredState(to).(*corev1.Pod); bare.Spec.NodeName != "n" || bare.Status.Phase != "" ||
		to.Status.Phase == "" {
		t.Errorf("bare is %+v", bare)
	}
}

// What cannot be served together is refused, and leaves what is served as it is.
func TestTableRefuses(t *testing.T) {
	ks := kinds.All()
	pods := ks.ByType(&corev1.Pod{})
	another := func(change func(*api.Kind, *api.Storage)) *api.Kind {
		k, s := *pods, *pods.Storage
		k.GVK.Group, k.Type.Typed = "example.com", false
		s.Prefix, s.Hub.GVK = "/registry/example.com/pods/", k.GVK
		k.Storage = &s
		change(&k, &s)
		return &k
	}
	for want, change := range map[string]func(*api.Kind, *api.Storage){
		"is served already": func(k *api.Kind, s *api.Storage) {
			k.GVK = pods.GVK
			s.Hub.GVK = pods.GVK
		},
		"both claim Go type":               func(k *api.Kind, s *api.Storage) { k.Type.Typed = true },
		"are both stored under":            func(k *api.Kind, s *api.Storage) { s.Prefix = pods.Storage.Prefix },
		"would be inside the storage of":   func(k *api.Kind, s *api.Storage) { s.Prefix = "/registry/pods/x/" },
		"is not a storage prefix":          func(k *api.Kind, s *api.Storage) { s.Prefix = "/elsewhere/pods/" },
		"has no storage":                   func(k *api.Kind, s *api.Storage) { k.Storage = nil },
		"has no conversion to":             func(k *api.Kind, s *api.Storage) { s.Hub.GVK.Version = "v9" },
		"lacks operations":                 func(k *api.Kind, s *api.Storage) { k.Type.Ops.Shallow = nil },
		"whether objects have a namespace": func(k *api.Kind, s *api.Storage) { s.Namespaced = false },
	} {
		before := ks.Table()
		err := ks.Register(another(change))
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("want %q, got %v", want, err)
		}
		if ks.Table() != before {
			t.Errorf("%s: the table has changed", want)
		}
	}
	if err := ks.Drop(another(func(*api.Kind, *api.Storage) {})); err == nil {
		t.Error("what is not served was dropped")
	}
}

// A change is visible atomically, and closes the Changed channel of the previous table.
func TestTableChanges(t *testing.T) {
	ks := kinds.All()
	was := ks.Table()
	old := ks.ByType(&corev1.ConfigMap{})
	next := *old
	if err := ks.Change([]*api.Kind{old}, []*api.Kind{&next}); err != nil {
		t.Fatal(err)
	}
	select {
	case <-was.Changed():
	default:
		t.Error("nobody hears of the change")
	}
	if ks.Table().Has(old) || !ks.Table().Has(&next) || ks.ByType(&corev1.ConfigMap{}) != &next || !was.Has(old) {
		t.Error("the tables are not what they should be")
	}
	if len(ks.All()) != len(was.All()) {
		t.Errorf("%d kinds, there were %d", len(ks.All()), len(was.All()))
	}
}
