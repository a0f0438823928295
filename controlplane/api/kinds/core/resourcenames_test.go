package core_test

import (
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/controlplane/api/kinds/kindstest"
)

// F38: the resources of nodes, volumes and limits, with the texts of Kubernetes.
func TestCapacities(t *testing.T) {
	node := func(capacity string) string { return "{metadata: {name: a}, status: {capacity: {" + capacity + "}}}" }
	both := func(name, value, why string) string {
		return kindstest.InvalidText("status.capacity."+name, value, why) + "\n" +
			kindstest.InvalidText("status.allocatable."+name, value, why)
	}
	const whole = "must be an integer"
	kindstest.CheckRefused[*corev1.Node](t,
		kindstest.BadObject{Text: node("cpu: 100m, pods: 110, Any Name: 1, example.com/gpu: 2"), Want: ""},
		kindstest.BadObject{Text: node("pods: 100m"), Want: both("pods", "100m", whole)},
		kindstest.BadObject{Text: node("example.com/gpu: 500m"), Want: both("example.com/gpu", "500m", whole)},
		kindstest.BadObject{Text: node("secrets: 1500m"), Want: both("secrets", "1500m", whole)},
		kindstest.BadObject{Text: node("cpu: -1"), Want: both("cpu", "-1", "must be greater than or equal to 0")},
	)
	volume := func(spec string) string {
		return "{metadata: {name: a}, spec: {hostPath: {path: /a}, " + spec + "}}"
	}
	kindstest.CheckRefused[*corev1.PersistentVolume](t,
		kindstest.BadObject{Text: volume("capacity: {storage: 1Gi}, accessModes: [ReadWriteOnce]"), Want: ""},
		kindstest.BadObject{Text: volume("persistentVolumeReclaimPolicy: Retain"),
			Want: "spec.accessModes: Required value\nspec.capacity: Required value\n" +
				`spec.capacity: Unsupported value: null: supported values: "storage"`},
		kindstest.BadObject{Text: volume("capacity: {storage: -1}, accessModes: ['']"),
			Want: `spec.accessModes: Unsupported value: "": supported values: "ReadOnlyMany", "ReadWriteMany", ` +
				`"ReadWriteOnce", "ReadWriteOncePod"` +
				"\nspec.capacity[storage]: Invalid value: -1: must be a valid resource quantity\n" +
				kindstest.InvalidText("spec.capacity[storage]", "-1", "must be greater than zero")},
		kindstest.BadObject{Text: volume("capacity: {storage: 1, cpu: 0}, accessModes: [ReadWriteOnce]"),
			Want: `spec.capacity: Unsupported value: {"cpu":"0","storage":"1"}: supported values: "storage"` + "\n" +
				kindstest.InvalidText("spec.capacity[cpu]", "0", "must be greater than zero")},
		kindstest.BadObject{Text: volume("capacity: {storage: 1}, accessModes: [ReadWriteOnce], volumeMode: ''"),
			Want: `spec.volumeMode: Unsupported value: "": supported values: "Block", "Filesystem"`},
	)
	limit := func(name string) string {
		return "{metadata: {name: a}, spec: {limits: [{type: Pod, max: {" + name + ": 1}}]}}"
	}
	kindstest.CheckRefused[*corev1.LimitRange](t,
		kindstest.BadObject{Text: limit("example.com/a"), Want: ""},
		kindstest.BadObject{Text: limit("requests.example.com/a"),
			Want: kindstest.InvalidText("spec.limits[0].max[requests.example.com/a]", "requests.example.com/a",
				"doesn't follow extended resource name standard")},
		kindstest.BadObject{Text: limit("storage"),
			Want: kindstest.InvalidText("spec.limits[0].max[storage]", "storage",
				"must be a standard resource for containers")},
	)
	kindstest.CheckRefused[*corev1.ResourceQuota](t,
		kindstest.BadObject{Text: "{metadata: {name: a}, spec: {hard: {kubernetes.io/a: 100m}}}", Want: ""},
		kindstest.BadObject{Text: "{metadata: {name: a}, spec: {scopes: [NotTerminating], hard: " +
			"{ephemeral-storage: 1}}}",
			Want: `spec.scopes: Invalid value: ["NotTerminating"]: unsupported scope applied to resource`},
	)
}

// F38: the taints, features, swap and address ranges of a node.
func TestNodeFields(t *testing.T) {
	node := func(rest string) string { return "{metadata: {name: a}, " + rest + "}" }
	const format = ": must start with an UpperCamelCase segment, with subsequent segments separated by '/' " +
		"(e.g., MyFeature or MyFeature/mySubFeature), and contain only alphanumeric characters and slashes"
	long := strings.Repeat("A", 254)
	kindstest.CheckRefused[*corev1.Node](t,
		kindstest.BadObject{Text: node("status: {declaredFeatures: [A, B/c, B/d1]}"), Want: ""},
		kindstest.BadObject{Text: node("status: {declaredFeatures: [a]}"),
			Want: `status.declaredFeatures[0]: Invalid value: "a": invalid feature name "a"` + format},
		kindstest.BadObject{Text: node("status: {declaredFeatures: [B, A, A]}"),
			Want: kindstest.InvalidText("status.declaredFeatures[1]", "A", "list must be sorted alphabetically") +
				"\nstatus.declaredFeatures[2]: Duplicate value: \"A\""},
		kindstest.BadObject{Text: node("status: {declaredFeatures: [" + long + "]}"),
			Want: kindstest.InvalidText("status.declaredFeatures[0]", long,
				`invalid feature name "`+long+`": must be no more than 253 characters`)},
		kindstest.BadObject{Text: node("status: {nodeInfo: {swap: {capacity: 0}}}"),
			Want: "metadata.nodeSwapStatus.capacity: Invalid value: 0: must be greater than zero"},
		kindstest.BadObject{Text: node("spec: {taints: [{key: a}, {key: b, effect: Junk}]}"),
			Want: "metadata.taints[0].effect: Required value\n" +
				`metadata.taints[1].effect: Unsupported value: "Junk": supported values: "NoSchedule", ` +
				`"PreferNoSchedule", "NoExecute"`},
		kindstest.BadObject{Text: node("spec: {podCIDRs: [10.0.0.0/24, 'fd00::/64']}"), Want: ""},
		kindstest.BadObject{Text: node("spec: {podCIDRs: [10.0.0.0/24, 10.0.1.0/24]}"),
			Want: `spec.podCIDRs: Invalid value: ["10.0.0.0/24","10.0.1.0/24"]: may specify no more than one CIDR ` +
				`for each IP family`},
		kindstest.BadObject{Text: node("spec: {podCIDRs: [10.0.0.0/24, x]}"),
			Want: kindstest.InvalidText("spec.podCIDRs[1]", "x",
				"must be a valid CIDR value, (e.g. 10.9.8.0/24 or 2001:db8::/64)") +
				"\nspec.podCIDRs: Internal error: invalid PodCIDRs. failed to check with dual stack with " +
				"error:invalid CIDR[1]: <nil> (invalid CIDR address: x)\n" +
				`spec.podCIDRs: Invalid value: ["10.0.0.0/24","x"]: may specify no more than one CIDR ` +
				`for each IP family`},
	)
}

// F38: both fields of a claim's source are judged, and addresses of Endpoints by both rules.
func TestClaimSourcesAndEndpointAddresses(t *testing.T) {
	const size = "accessModes: [ReadWriteOnce], resources: {requests: {storage: 1}}"
	const kind = "must be 'PersistentVolumeClaim' when referencing the default apiGroup"
	kindstest.CheckRefused[*corev1.PersistentVolumeClaim](t,
		kindstest.BadObject{Text: "{metadata: {name: a}, spec: {" + size + ", dataSourceRef: {kind: Pod, name: ''}}}",
			Want: "spec.dataSource.name: Required value\n" + kindstest.InvalidText("spec.dataSource", "Pod", kind) +
				"\nspec.dataSourceRef.name: Required value\n" +
				kindstest.InvalidText("spec.dataSourceRef", "Pod", kind)},
	)
	kindstest.CheckRefused[*corev1.Endpoints](t,
		kindstest.BadObject{Text: "{metadata: {name: a}, subsets: [{addresses: [{ip: x}]}]}",
			Want: kindstest.InvalidText("subsets[0].addresses[0].ip", "x",
				"must be a valid IP address, (e.g. 10.9.8.7 or 2001:db8::ffff)") + "\n" +
				kindstest.InvalidText("subsets[0].addresses[0].ip", "x", "must be a valid IP address")},
	)
}
