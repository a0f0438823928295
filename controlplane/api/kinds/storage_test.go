package kinds

import (
	"strings"
	"testing"

	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/util/validation"

	"keelson.dev/keelson/controlplane/api/kinds/storage"
)

func TestStorageClassRules(t *testing.T) {
	class := func(rest string) string { return "{metadata: {name: a}, provisioner: x.io/y, " + rest + "}" }
	term := func(e string) string { return "{matchLabelExpressions: [" + e + "]}" }
	const zone, at = "{key: zone, values: [a, b]}", "allowedTopologies[0].matchLabelExpressions[0]"
	refuses[*storagev1.StorageClass](t,
		bad{class("parameters: {a: b}, allowedTopologies: [" + term(zone) + "]"), ""},
		bad{class("parameters: {'': b}"), invalidText("parameters", "", "field can not be empty.")},
		bad{class("parameters: {a: " + strings.Repeat("a", storage.MaxParametersSize) + "}"), "parameters: Too long: may not be more than 262144 bytes"},
		bad{class("allowedTopologies: [" + term("{key: zone}") + "]"), at + ".values: Required value"},
		bad{class("allowedTopologies: [" + term("{key: zone, values: [a, a]}") + "]"), at + `.values[1]: Duplicate value: "a"`},
		bad{class("allowedTopologies: [" + term("{key: 'z z', values: [a]}") + "]"), invalidText(at+".key", "z z", validation.IsQualifiedName("z z")[0])},
		bad{class("allowedTopologies: [" + term(zone+", {key: zone, values: [c]}") + "]"), `allowedTopologies[0].matchLabelExpressions[1].key: Duplicate value: "zone"`},
		bad{class("allowedTopologies: [" + term(zone) + ", " + term("{key: zone, values: [b, a]}") + "]"), `allowedTopologies[1].matchLabelExpressions: Duplicate value: ""`},
		bad{class("allowedTopologies: [{}]"), `allowedTopologies[0].matchLabelExpressions: Duplicate value: ""`},
		bad{class("reclaimPolicy: ''"), ""},
		bad{class("reclaimPolicy: Recycle"), `reclaimPolicy: Unsupported value: "Recycle": supported values: "Delete", "Retain"`},
		bad{class("volumeBindingMode: Later"), `volumeBindingMode: Unsupported value: "Later": supported values: "Immediate", "WaitForFirstConsumer"`},
		bad{"{metadata: {name: a}}", "provisioner: Required value"},
	)
}

func TestCSIDriverRules(t *testing.T) {
	driver := func(spec string) string { return "{metadata: {name: x.io}, spec: {" + spec + "}}" }
	token := func(tokens string) string { return driver("tokenRequests: [" + tokens + "]") }
	refuses[*storagev1.CSIDriver](t,
		bad{token("{audience: a, expirationSeconds: 600}, {}"), ""},
		bad{driver("volumeLifecycleModes: [Fleeting]"), `spec.volumeLifecycleModes: Unsupported value: "Fleeting": supported values: "Ephemeral", "Persistent"`},
		bad{driver("tokenRequests: [{}], serviceAccountTokenInSecrets: true"), ""},
		bad{driver("serviceAccountTokenInSecrets: false"), "spec.serviceAccountTokenInSecrets: Invalid value: false: serviceAccountTokenInSecrets is set but no tokenRequests are specified"},
		bad{driver("fsGroupPolicy: All"), `spec.fsGroupPolicy: Unsupported value: "All": supported values: "File", "None", "ReadWriteOnceWithFSType"`},
		bad{token("{audience: a}, {audience: a}"), `spec.tokenRequests[1].audience: Duplicate value: "a"`},
		bad{token("{}, {}"), `spec.tokenRequests[1].audience: Duplicate value: ""`},
		bad{token("{audience: a, expirationSeconds: 599}"), "spec.tokenRequests[0].expirationSeconds: Invalid value: 599: may not specify a duration less than 10 minutes"},
		bad{token("{audience: a, expirationSeconds: 4294967297}"), "spec.tokenRequests[0].expirationSeconds: Invalid value: 4294967297: may not specify a duration larger than 2^32 seconds"},
		bad{driver("nodeAllocatableUpdatePeriodSeconds: 9"), "spec.nodeAllocatableUpdatePeriodSeconds: Invalid value: 9: must be greater than or equal to 10 seconds"},
		bad{"{metadata: {name: X_io}}", invalidText("metadata.name", "X_io", notSubdomain)},
	)
	changes(t, driver(""),
		changed[*storagev1.CSIDriver]{change: func(d *storagev1.CSIDriver) { d.Spec.AttachRequired = ptr(false) },
			want: "spec.attachedRequired: Invalid value: false: field is immutable"},
		changed[*storagev1.CSIDriver]{change: func(d *storagev1.CSIDriver) {
			d.Spec.VolumeLifecycleModes = []storagev1.VolumeLifecycleMode{"Ephemeral"}
		},
			want: `spec.volumeLifecycleModes: Invalid value: ["Ephemeral"]: field is immutable`},
		changed[*storagev1.CSIDriver]{change: func(d *storagev1.CSIDriver) { d.Spec.PodInfoOnMount = ptr(true) }},
	)
}

func TestCSINodeRules(t *testing.T) {
	node := func(drivers string) string { return "{metadata: {name: n}, spec: {drivers: [" + drivers + "]}}" }
	const at = "spec.drivers[0]"
	refuses[*storagev1.CSINode](t,
		bad{node("{name: x.io, nodeID: i, topologyKeys: [a, b], allocatable: {count: 0}}"), ""},
		bad{node("{nodeID: i}"), at + ".name: Required value"},
		bad{node("{name: x_, nodeID: i}"), invalidText(at+".name", "x_", notSubdomain)},
		bad{node("{name: " + strings.Repeat("a", 64) + ", nodeID: i}"), at + ".name: Too long: may not be more than 63 bytes"},
		bad{node("{name: x}"), at + ".nodeID: Required value"},
		bad{node("{name: x, nodeID: " + strings.Repeat("a", 257) + "}"), invalidText(at+".nodeID", strings.Repeat("a", 257), "must be 256 characters or less")},
		bad{node("{name: x, nodeID: i, allocatable: {count: -1}}"), at + ".allocatable.count: Invalid value: -1: must be greater than or equal to 0"},
		bad{node("{name: x, nodeID: i}, {name: x, nodeID: j}"), `spec.drivers[1].name: Duplicate value: "x"`},
		bad{node("{name: x, nodeID: i, topologyKeys: ['']}"), at + ": Required value"},
		bad{node("{name: x, nodeID: i, topologyKeys: [a, a]}"), at + `: Duplicate value: "a"`},
		bad{node("{name: x, nodeID: i, topologyKeys: ['a b']}"), invalidText(at, "a b", validation.IsQualifiedName("a b")[0])},
	)
	was := load[*storagev1.CSINode](t, node("{name: x, nodeID: i}"))
	now := was.DeepCopy()
	now.Spec.Drivers[0].Allocatable = &storagev1.VolumeNodeResources{Count: ptr(int32(4))}
	now.Spec.Drivers = append(now.Spec.Drivers, storagev1.CSINodeDriver{Name: "y", NodeID: "i"})
	k := All().ByType(was)
	was.ResourceVersion, now.ResourceVersion = "1", "1"
	if got := lines(k.ValidateUpdate(now, was)); got != "" {
		t.Error(got)
	}
	now.Spec.Drivers[0].NodeID = "j"
	if got := lines(k.ValidateUpdate(now, was)); !strings.HasPrefix(got, "spec.drivers: Invalid value: ") || !strings.HasSuffix(got, "field is immutable") {
		t.Error(got)
	}
}

func TestVolumeAttachmentRules(t *testing.T) {
	attachment := func(source string) string {
		return "{metadata: {name: a}, spec: {attacher: x.io, nodeName: n, source: {" + source + "}}}"
	}
	const at = "spec.source"
	inline := func(spec string) string { return attachment("inlineVolumeSpec: {" + spec + "}") }
	const csi = "accessModes: [ReadWriteOnce], csi: {driver: x.io, volumeHandle: h}"
	const context = ": Forbidden: may not be specified in the context of inline volumes"
	refuses[*storagev1.VolumeAttachment](t,
		bad{attachment("persistentVolumeName: v"), ""},
		bad{inline(csi), ""},
		bad{attachment(""), at + ": Required value: must specify exactly one of inlineVolumeSpec and persistentVolumeName"},
		bad{attachment("persistentVolumeName: v, inlineVolumeSpec: {}"), at + ": Forbidden: must specify exactly one of inlineVolumeSpec and persistentVolumeName"},
		bad{attachment("persistentVolumeName: ''"), at + ".persistentVolumeName: Required value: must specify non empty persistentVolumeName"},
		bad{attachment("persistentVolumeName: V"), invalidText(at+".persistentVolumeName", "V", notSubdomain)},
		bad{"{metadata: {name: a}, spec: {nodeName: n, source: {persistentVolumeName: v}}}", "spec.attacher: Required value"},
		bad{"{metadata: {name: a}, spec: {attacher: a, source: {persistentVolumeName: v}}}", invalidText("spec.nodeName", "", notSubdomain)},
		bad{inline("accessModes: [ReadWriteOnce]"), at + ".inlineVolumeSpec.csi: Required value: has to be specified in the context of inline volumes"},
		bad{inline(csi + ", claimRef: {name: c}, capacity: {storage: 1}, storageClassName: s"), at + ".inlineVolumeSpec.capacity" + context + "\n" +
			at + ".inlineVolumeSpec.claimRef" + context + "\n" + at + ".inlineVolumeSpec.storageClassName" + context},
	)
	changes(t, attachment("persistentVolumeName: v"),
		changed[*storagev1.VolumeAttachment]{sub: "status", change: func(a *storagev1.VolumeAttachment) {
			a.Status.AttachError = &storagev1.VolumeError{Message: strings.Repeat("a", 1025), ErrorCode: ptr(int32(-1))}
			a.Status.AttachmentMetadata = map[string]string{"a": strings.Repeat("a", storage.MaxAttachmentSize)}
		}, want: "status.attachmentMetadata: Too long: may not be more than 262144 bytes\nstatus.attachError.message: Too long: may not be more than 1024 bytes\n" +
			"status.attachError.errorCode: Invalid value: -1: must be between 0 and 2147483647, inclusive"},
	)
}

func TestCSIStorageCapacity(t *testing.T) {
	capacity := func(rest string) string { return "{metadata: {name: a}, storageClassName: c, " + rest + "}" }
	refuses[*storagev1.CSIStorageCapacity](t,
		bad{capacity("capacity: 1Gi, nodeTopology: {matchLabels: {a: b}}"), ""},
		bad{"{metadata: {name: a}}", invalidText("storageClassName", "", notSubdomain)},
		bad{"{metadata: {name: a}, storageClassName: C}", invalidText("storageClassName", "C", notSubdomain)},
		bad{capacity("capacity: -1"), invalidText("capacity", "-1", "must be greater than or equal to 0")},
		bad{capacity("nodeTopology: {matchExpressions: [{key: a, operator: Near}]}"), `nodeTopology.matchExpressions[0].operator: Invalid value: "Near": not a valid selector operator`},
		bad{capacity("nodeTopology: {matchExpressions: [{key: a, operator: Exists, values: [b]}]}"), "nodeTopology.matchExpressions[0].values: Forbidden: may not be specified when `operator` is 'Exists' or 'DoesNotExist'"},
		bad{capacity("nodeTopology: {matchLabels: {a: 'b c'}}"), invalidText("nodeTopology.matchLabels", "b c", validation.IsValidLabelValue("b c")[0])},
		bad{capacity("nodeTopology: {matchLabels: {'a b': c}}"), invalidText("nodeTopology.matchLabels", "a b", validation.IsQualifiedName("a b")[0])},
		bad{"{metadata: {name: A}, storageClassName: c}", invalidText("metadata.name", "A", notSubdomain)},
	)
	changes(t, capacity("capacity: 1Gi"),
		changed[*storagev1.CSIStorageCapacity]{change: func(c *storagev1.CSIStorageCapacity) { c.Capacity = nil }},
		changed[*storagev1.CSIStorageCapacity]{change: func(c *storagev1.CSIStorageCapacity) { c.StorageClassName = "d" }, want: invalidText("storageClassName", "d", "field is immutable")},
	)
	for text, want := range map[string]string{capacity("capacity: 1Gi"): "a|c|1Gi", capacity(""): "a|c|<unset>"} {
		if got := table[*storagev1.CSIStorageCapacity](t, text); got != "NAME|STORAGECLASSNAME|CAPACITY\n"+want {
			t.Error(got)
		}
	}
}

func TestVolumeAttributesClass(t *testing.T) {
	refuses[*storagev1.VolumeAttributesClass](t,
		bad{"{metadata: {name: a}, driverName: x.io, parameters: {a: b}}", ""},
		bad{"{metadata: {name: a}, parameters: {a: b}}", "driverName: Required value"},
		bad{"{metadata: {name: a}, driverName: 'x y', parameters: {a: b}}", invalidText("driverName", "x y", validation.IsQualifiedName("x y")[0])},
		bad{"{metadata: {name: a}, driverName: x.io/a/b, parameters: {a: b}}", invalidText("driverName", "x.io/a/b", validation.IsQualifiedName("a/b/c")[0])},
		bad{"{metadata: {name: a}, driverName: x.io}", "parameters: Required value: must contain at least one key/value pair"},
		bad{"{metadata: {name: a}, driverName: x.io, parameters: {}}", "parameters: Required value: must contain at least one key/value pair"},
		bad{"{metadata: {name: a}, driverName: x.io, parameters: {'': b}}", invalidText("parameters", "", "field can not be empty.")},
		bad{"{metadata: {name: a}, driverName: x.io, parameters: {a: " + strings.Repeat("a", storage.MaxParametersSize) + "}}", "parameters: Too long: may not be more than 262144 bytes"},
		bad{"{metadata: {name: A}, driverName: x.io, parameters: {a: b}}", invalidText("metadata.name", "A", notSubdomain)},
	)
	changes(t, "{metadata: {name: a}, driverName: x.io, parameters: {a: b}}",
		changed[*storagev1.VolumeAttributesClass]{change: func(c *storagev1.VolumeAttributesClass) { c.DriverName = "y.io" }, want: "driverName: Forbidden: updates to driverName are forbidden."},
		changed[*storagev1.VolumeAttributesClass]{change: func(c *storagev1.VolumeAttributesClass) { c.Parameters["a"] = "c" }, want: "parameters: Forbidden: updates to parameters are forbidden."},
	)
	if got := table[*storagev1.VolumeAttributesClass](t, "{metadata: {name: a}, driverName: x.io}"); got != "NAME|DRIVERNAME|AGE\na|x.io|3h" {
		t.Error(got)
	}
}
