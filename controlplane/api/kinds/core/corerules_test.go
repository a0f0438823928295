package core_test

import (
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"

	"keelson.dev/keelson/controlplane/api/kinds"
	"keelson.dev/keelson/controlplane/api/kinds/kindstest"
)

// A PersistentVolume has one source, and each further source is an error. Mount options are
// validated where it is mounted. F38
func TestPersistentVolumeRules(t *testing.T) {
	with := func(spec string) string {
		return "{metadata: {name: a}, spec: {accessModes: [ReadWriteOnce], capacity: {storage: 1Gi}, " + spec + "}}"
	}
	const (
		hosts = "nodeAffinity: {required: {nodeSelectorTerms: [{matchExpressions: [{key: kubernetes.io/hostname, " +
			"operator: In, values: [w1]}]}]}}, "
		second = ": Forbidden: may not specify more than 1 volume type"
	)
	long := strings.Repeat("b", 300)
	kindstest.CheckRefused[*corev1.PersistentVolume](t,
		kindstest.BadObject{Text: with("nfs: {server: s, path: /a}, csi: {driver: ''}, iscsi: {}, " +
			"hostPath: {path: /a}"),
			Want: "spec.nfs" + second + "\nspec.iscsi" + second + "\nspec.csi" + second},
		kindstest.BadObject{Text: with("hostPath: {path: /a}, local: {path: ''}"), Want: "spec.local" + second},
		kindstest.BadObject{Text: with("csi: {driver: " + long + ", volumeHandle: h}"),
			Want: "spec.csi.driver: Too long: may not be more than 63 bytes\n" +
				kindstest.InvalidText("spec.csi.driver", long, "must be no more than 253 characters")},
		kindstest.BadObject{Text: with("hostPath: {path: /a}, mountOptions: [ro]"), Want: ""},
		kindstest.BadObject{Text: with(hosts + "local: {path: /a}, volumeMode: Block, mountOptions: [ro]"), Want: ""},
	)
	spec := func(f func(*corev1.PersistentVolumeSpec)) func(*corev1.PersistentVolume) {
		return func(v *corev1.PersistentVolume) { f(&v.Spec) }
	}
	key := func(name string) func(*corev1.PersistentVolume) {
		return spec(func(s *corev1.PersistentVolumeSpec) {
			s.NodeAffinity.Required.NodeSelectorTerms[0].MatchExpressions[0].Key = name
		})
	}
	const (
		source = "spec.persistentvolumesource: Forbidden: spec.persistentvolumesource is immutable after " +
			"creation\nchanged: spec."
		stays = ": field is immutable, except for updating from beta label to GA"
	)
	kindstest.CheckChanges(t,
		with("nodeAffinity: {required: {nodeSelectorTerms: [{matchExpressions: [{key: "+
			"failure-domain.beta.kubernetes.io/zone, operator: Exists}]}]}}, csi: {driver: d, volumeHandle: h}"),
		kindstest.Change[*corev1.PersistentVolume]{Generation: 1, Change: spec(func(s *corev1.PersistentVolumeSpec) {
			s.CSI.VolumeHandle = "i"
		}), Want: source + "csi"},
		kindstest.Change[*corev1.PersistentVolume]{Generation: 1, Change: spec(func(s *corev1.PersistentVolumeSpec) {
			s.CSI, s.HostPath = nil, &corev1.HostPathVolumeSource{Path: "/a"}
		}), Want: source + "hostPath, spec.csi"},
		kindstest.Change[*corev1.PersistentVolume]{Generation: 1, Change: key("topology.kubernetes.io/zone")},
		kindstest.Change[*corev1.PersistentVolume]{Generation: 1, Change: key("topology.kubernetes.io/region"),
			Want: `nodeAffinity: Invalid value: ` +
				`{"required":{"nodeSelectorTerms":[{"matchExpressions":[{"key":"topology.kubernetes.io/region",` +
				`"operator":"Exists"}]}]}}` + stays},
		kindstest.Change[*corev1.PersistentVolume]{Generation: 1, Change: spec(func(s *corev1.PersistentVolumeSpec) {
			s.NodeAffinity = nil
		}), Want: "nodeAffinity: Invalid value: null" + stays},
	)
}

// A Node's podCIDR is the first of its podCIDRs and wins over another one; both are given once. F38
func TestNodeRules(t *testing.T) {
	spec := func(text string) string { return "{metadata: {name: a}, spec: {" + text + "}}" }
	annotated := func(key, value string) string {
		return "{metadata: {name: a, annotations: {" + key + ": '" + value + "'}}}"
	}
	const avoid, taints = "scheduler.alpha.kubernetes.io/preferAvoidPods", "scheduler.alpha.kubernetes.io/taints"
	kindstest.CheckRefused[*corev1.Node](t,
		kindstest.BadObject{Text: spec("podCIDR: 10.9.0.0/24, podCIDRs: [10.1.0.0/24]"), Want: ""},
		kindstest.BadObject{Text: spec("podCIDR: 10.9.0.0/24, podCIDRs: [x]"), Want: ""},
		kindstest.BadObject{Text: spec("podCIDR: x, podCIDRs: [10.1.0.0/24]"),
			Want: kindstest.InvalidText("spec.podCIDRs[0]", "x",
				"must be a valid CIDR value, (e.g. 10.9.8.0/24 or 2001:db8::/64)")},
		kindstest.BadObject{Text: "{metadata: {name: a}, status: {addresses: [{type: InternalIP, address: 1.1.1.1}, " +
			"{type: InternalIP, address: 1.1.1.1}]}}", Want: ""},
		kindstest.BadObject{Text: annotated(avoid, "x"),
			Want: kindstest.InvalidText("metadata.annotations.AvoidPods", avoid,
				"invalid character 'x' looking for beginning of value")},
		kindstest.BadObject{Text: annotated(avoid,
			`{"preferAvoidPods":[{"podSignature":{}},{"podSignature":{"podController":{"controller":false}}},`+
				`{"podSignature":{"podController":{"controller":true}}}]}`),
			Want: "metadata.annotations." + avoid + "[0].PodSignature: Required value\n" +
				"metadata.annotations." + avoid + "[1].PodSignature.PodController.Controller: Invalid value: false: " +
				"must point to a controller"},
		kindstest.BadObject{Text: annotated(taints, "x"),
			Want: kindstest.InvalidText("metadata.annotations", taints,
				"invalid character 'x' looking for beginning of value")},
		kindstest.BadObject{Text: annotated(taints, `[{"key":"k"}]`),
			Want: "metadata.annotations." + taints + "[0].effect: Required value"},
	)
	ranges := func(first string, all ...string) func(*corev1.Node) {
		return func(n *corev1.Node) { n.Spec.PodCIDR, n.Spec.PodCIDRs = first, all }
	}
	const once = `spec.podCIDRs: Forbidden: node updates may not change podCIDR except from "" to valid`
	twice := func(n *corev1.Node) {
		n.Status.Addresses = []corev1.NodeAddress{{Type: "InternalIP", Address: "1.1.1.1"},
			{Type: "InternalIP", Address: "1.1.1.1"}}
	}
	const duplicate = `status.addresses[1]: Duplicate value: {"Type":"InternalIP","Address":"1.1.1.1"}`
	kindstest.CheckChanges(t, "{metadata: {name: a}, spec: {podCIDR: 10.1.0.0/24}}",
		kindstest.Change[*corev1.Node]{Generation: 1, Change: ranges("10.9.0.0/24", "10.1.0.0/24"), Want: once},
		// a cluster's second family
		kindstest.Change[*corev1.Node]{Generation: 1, Change: ranges("10.1.0.0/24", "10.1.0.0/24", "fd00::/64")},
		kindstest.Change[*corev1.Node]{Change: ranges("10.1.0.0/24")},
		kindstest.Change[*corev1.Node]{Generation: 1, Change: ranges(""), Want: once},
		kindstest.Change[*corev1.Node]{Generation: 1, Change: func(n *corev1.Node) {
			n.Spec.DoNotUseExternalID = "x"
		}, Want: "spec.externalID: Forbidden: may not be updated"},
		kindstest.Change[*corev1.Node]{Sub: "status", Change: twice, Want: duplicate},
		kindstest.Change[*corev1.Node]{Sub: "status", Change: func(n *corev1.Node) {
			n.Annotations = map[string]string{taints: "x"}
		},
			Want: kindstest.InvalidText("metadata.annotations", taints,
				"invalid character 'x' looking for beginning of value")},
		// dropped
		kindstest.Change[*corev1.Node]{Change: func(n *corev1.Node) {
			n.Spec.ConfigSource = &corev1.NodeConfigSource{}
		}},
	)
}

// The cluster addresses of a Service are for life, except for the second one. F38
func TestClusterIPsStay(t *testing.T) {
	set := func(first string, all ...string) func(*corev1.Service) {
		return func(s *corev1.Service) { s.Spec.ClusterIP, s.Spec.ClusterIPs = first, all }
	}
	one := func(first string, all ...string) func(*corev1.Service) {
		return func(s *corev1.Service) {
			set(first, all...)(s)
			s.Spec.IPFamilyPolicy, s.Spec.IPFamilies = new(corev1.IPFamilyPolicySingleStack), s.Spec.IPFamilies[:1]
		}
	}
	const (
		has   = "{metadata: {name: a}, spec: {clusterIP: 10.96.0.1, clusterIPs: ["
		stays = ": may not change once set"
		at    = "spec.clusterIPs"
	)
	kindstest.CheckChanges(t, has+"10.96.0.1], ports: [{port: 80}]}}",
		kindstest.Change[*corev1.Service]{Change: set("10.96.0.2", "10.96.0.2"),
			Want: at + `[0]: Invalid value: ["10.96.0.2"]` + stays, Generation: 1},
		kindstest.Change[*corev1.Service]{Change: set("10.96.0.2", "10.96.0.1"),
			Want: at + `[0]: Invalid value: ["10.96.0.2"]` + stays, Generation: 1},
		kindstest.Change[*corev1.Service]{Change: set("10.96.0.1", "10.96.0.2"), Generation: 1,
			Want: at + `: Invalid value: ["10.96.0.2"]: first value must match ` + "`clusterIP`\n" + at +
				`[0]: Invalid value: ["10.96.0.2"]` + stays},
		kindstest.Change[*corev1.Service]{Change: set("None", "None"),
			Want: at + `[0]: Invalid value: ["None"]` + stays, Generation: 1},
		kindstest.Change[*corev1.Service]{Change: set("")},
		kindstest.Change[*corev1.Service]{Change: set("10.96.0.1", "10.96.0.1", "fd00::1"), Generation: 1},
		kindstest.Change[*corev1.Service]{Generation: 1, Change: func(s *corev1.Service) {
			s.Spec.Type, s.Spec.ExternalName = corev1.ServiceTypeExternalName, "a.b"
		}},
	)
	kindstest.CheckChanges(t, has+"10.96.0.1, 'fd00::1'], ipFamilies: [IPv4, IPv6], ipFamilyPolicy: RequireDualStack, "+
		"ports: [{port: 80}]}}",
		kindstest.Change[*corev1.Service]{Change: one("10.96.0.1", "10.96.0.1"), Generation: 1},
		kindstest.Change[*corev1.Service]{Change: set("10.96.0.1", "10.96.0.1"), Generation: 1,
			Want: `spec.ipFamilyPolicy: Invalid value: "RequireDualStack": must be set to 'SingleStack' when ` +
				`releasing the secondary clusterIP`},
		kindstest.Change[*corev1.Service]{Change: set("10.96.0.1", "10.96.0.1", "fd00::2"),
			Want: at + `[1]: Invalid value: ["10.96.0.1","fd00::2"]` + stays, Generation: 1},
	)
	kindstest.CheckChanges(t, "{metadata: {name: a}, spec: {type: ExternalName, externalName: a.b}}",
		kindstest.Change[*corev1.Service]{Generation: 1, Change: func(s *corev1.Service) {
			s.Spec.Type, s.Spec.Ports = corev1.ServiceTypeClusterIP, []corev1.ServicePort{{Port: 80}}
			set("10.96.0.7", "10.96.0.7")(s)
		}},
		kindstest.Change[*corev1.Service]{Generation: 1, Change: set("10.96.0.7", "10.96.0.7"),
			Want: at + ": Forbidden: may not be set for ExternalName services"},
	)
}

// The name of a kind that Kubernetes validates declaratively has at most 253 bytes. F38
func TestLongNames(t *testing.T) {
	long := strings.Repeat("a", 254)
	const rest = "}, spec: {selector: {a: b}, template: {metadata: {labels: {a: b}}, spec: {containers: [{name: " +
		"c, image: i}]}}}}"
	kindstest.CheckRefused[*corev1.ReplicationController](t,
		kindstest.BadObject{Text: "{metadata: {name: " + long[1:] + rest, Want: ""},
		kindstest.BadObject{Text: "{metadata: {name: " + long + rest,
			Want: kindstest.InvalidText("metadata.name", long, "must be no more than 253 bytes")},
	)
	kindstest.CheckRefused[*resourcev1.DeviceClass](t,
		kindstest.BadObject{Text: "{metadata: {name: " + long + "}}",
			Want: kindstest.InvalidText("metadata.name", long, "must be no more than 253 bytes")})
}

// A dataSource that is neither a claim nor a snapshot is dropped from a claim without dataSourceRef, and kept where it is stored. F38
func TestUnknownDataSourcesAreDropped(t *testing.T) {
	claim := func(rest string) string {
		return "{metadata: {name: a}, spec: {accessModes: [ReadWriteOnce], resources: {requests: {storage: 1Gi}}, " +
			rest + "}}"
	}
	group := "example.com"
	for text, want := range map[string]string{
		"dataSource: {kind: Backup, name: b, apiGroup: example.com}":                "",
		"dataSource: {kind: '', name: ''}":                                          "",
		"dataSource: {kind: PersistentVolumeClaim, name: b, apiGroup: example.com}": "",
		"dataSource: {kind: PersistentVolumeClaim, name: b}": "PersistentVolumeClaim " +
			"PersistentVolumeClaim",
		"dataSource: {kind: VolumeSnapshot, name: b, apiGroup: " +
			"snapshot.storage.k8s.io}": "VolumeSnapshot VolumeSnapshot",
		"dataSourceRef: {kind: Backup, name: b, apiGroup: example.com}": "Backup Backup",
	} {
		c := kindstest.Load[*corev1.PersistentVolumeClaim](t, claim(text))
		k := kinds.All().ByType(c)
		k.Writes.PrepareCreate(c)
		got := ""
		if c.Spec.DataSource != nil && c.Spec.DataSourceRef != nil {
			got = c.Spec.DataSource.Kind + " " + c.Spec.DataSourceRef.Kind
		}
		if errs := k.ValidateObject(c, nil); got != want || len(errs) > 0 ||
			got == "" && (c.Spec.DataSource != nil || c.Spec.DataSourceRef != nil) {
			t.Errorf("%s: sources %q, want %q; faults %v", text, got, want, errs)
		}
	}
	kindstest.CheckChanges(t, claim("dataSourceRef: {kind: Backup, name: b, apiGroup: example.com}"),
		// an older client
		kindstest.Change[*corev1.PersistentVolumeClaim]{Change: func(c *corev1.PersistentVolumeClaim) {
			c.Spec.DataSourceRef = nil
		}},
	)
	const immutable = "spec: Forbidden: spec is immutable after creation except resources.requests and " +
		"volumeAttributesClassName for bound claims"
	kindstest.CheckChanges(t, claim("volumeMode: Filesystem"),
		kindstest.Change[*corev1.PersistentVolumeClaim]{Change: func(c *corev1.PersistentVolumeClaim) {
			c.Spec.DataSource = &corev1.TypedLocalObjectReference{APIGroup: &group, Kind: "Backup", Name: "b"}
		}},
		kindstest.Change[*corev1.PersistentVolumeClaim]{Generation: 1, Change: func(c *corev1.PersistentVolumeClaim) {
			c.Spec.VolumeAttributesClassName = new("")
		}, Want: immutable},
	)
}

// Quotas of huge pages have no scopes, and an Event of the core group may have any name that a path can have. F38
func TestQuotaScopesAndEventNames(t *testing.T) {
	const wrong = "unsupported scope applied to resource"
	kindstest.CheckRefused[*corev1.ResourceQuota](t,
		kindstest.BadObject{Text: "{metadata: {name: a}, spec: {hard: {hugepages-2Mi: 2Mi}, scopes: [Terminating]}}",
			Want: `spec.scopes: Invalid value: ["Terminating"]: ` + wrong},
		kindstest.BadObject{Text: "{metadata: {name: a}, spec: {hard: {requests.hugepages-2Mi: 2Mi}, scopes: " +
			"[BestEffort]}}", Want: `spec.scopes: Invalid value: ["BestEffort"]: ` + wrong},
		kindstest.BadObject{Text: "{metadata: {name: a}, spec: {hard: {hugepages-2Mi: 2Mi}}}", Want: ""},
	)
	const rest = ", namespace: default}, involvedObject: {kind: Pod, namespace: default}}"
	kindstest.CheckRefused[*corev1.Event](t,
		kindstest.BadObject{Text: "{metadata: {name: Pod_A.1" + rest, Want: ""},
		kindstest.BadObject{Text: "{metadata: {name: a/b" + rest,
			Want: kindstest.InvalidText("metadata.name", "a/b", "may not contain '/'")},
	)
}
