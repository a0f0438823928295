package storage_test

import (
	"strings"
	"testing"

	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/util/validation"

	"keelson.dev/keelson/controlplane/api/kinds"
	"keelson.dev/keelson/controlplane/api/kinds/kindstest"
	"keelson.dev/keelson/controlplane/api/kinds/storage"
)

func TestStorageClassRules(t *testing.T) {
	class := func(rest string) string { return "{metadata: {name: a}, provisioner: x.io/y, " + rest + "}" }
	term := func(e string) string { return "{matchLabelExpressions: [" + e + "]}" }
	const zone, at = "{key: zone, values: [a, b]}", "allowedTopologies[0].matchLabelExpressions[0]"
	kindstest.CheckRefused[*storagev1.StorageClass](t,
		kindstest.BadObject{Text: class("parameters: {a: b}, allowedTopologies: [" + term(zone) + "]"), Want: ""},
		kindstest.BadObject{Text: class("parameters: {'': b}"),
			Want: kindstest.InvalidText("parameters", "", "field can not be empty.")},
		kindstest.BadObject{Text: class("parameters: {a: " + strings.Repeat("a", storage.MaxParametersSize) + "}"),
			Want: "parameters: Too long: may not be more than 262144 bytes"},
		kindstest.BadObject{Text: class("allowedTopologies: [" + term("{key: zone}") + "]"),
			Want: at + ".values: Required value"},
		kindstest.BadObject{Text: class("allowedTopologies: [" + term("{key: zone, values: [a, a]}") + "]"),
			Want: at + `.values[1]: Duplicate value: "a"`},
		kindstest.BadObject{Text: class("allowedTopologies: [" + term("{key: 'z z', values: [a]}") + "]"),
			Want: kindstest.InvalidText(at+".key", "z z", validation.IsQualifiedName("z z")[0])},
		kindstest.BadObject{Text: class("allowedTopologies: [" + term(zone+", {key: zone, values: [c]}") + "]"),
			Want: `allowedTopologies[0].matchLabelExpressions[1].key: Duplicate value: "zone"`},
		kindstest.BadObject{Text: class("allowedTopologies: [" + term(zone) + ", " +
			term("{key: zone, values: [b, a]}") + "]"),
			Want: `allowedTopologies[1].matchLabelExpressions: Duplicate value: ""`},
		kindstest.BadObject{Text: class("allowedTopologies: [{}]"),
			Want: `allowedTopologies[0].matchLabelExpressions: Duplicate value: ""`},
		kindstest.BadObject{Text: class("reclaimPolicy: ''"), Want: ""},
		kindstest.BadObject{Text: class("reclaimPolicy: Recycle"),
			Want: `reclaimPolicy: Unsupported value: "Recycle": supported values: "Delete", "Retain"`},
		kindstest.BadObject{Text: class("volumeBindingMode: Later"),
			Want: `volumeBindingMode: Unsupported value: "Later": supported values: "Immediate", ` +
				`"WaitForFirstConsumer"`},
		kindstest.BadObject{Text: "{metadata: {name: a}}", Want: "provisioner: Required value"},
	)
}

func TestCSIDriverRules(t *testing.T) {
	driver := func(spec string) string { return "{metadata: {name: x.io}, spec: {" + spec + "}}" }
	token := func(tokens string) string { return driver("tokenRequests: [" + tokens + "]") }
	kindstest.CheckRefused[*storagev1.CSIDriver](t,
		kindstest.BadObject{Text: token("{audience: a, expirationSeconds: 600}, {}"), Want: ""},
		kindstest.BadObject{Text: driver("volumeLifecycleModes: [Fleeting]"),
			Want: `spec.volumeLifecycleModes: Unsupported value: "Fleeting": supported values: ` +
				`"Ephemeral", "Persistent"`},
		kindstest.BadObject{Text: driver("tokenRequests: [{}], serviceAccountTokenInSecrets: true"), Want: ""},
		kindstest.BadObject{Text: driver("serviceAccountTokenInSecrets: false"),
			Want: "spec.serviceAccountTokenInSecrets: Invalid value: false: serviceAccountTokenInSecrets is set but " +
				"no tokenRequests are specified"},
		kindstest.BadObject{Text: driver("fsGroupPolicy: All"),
			Want: `spec.fsGroupPolicy: Unsupported value: "All": supported values: "File", "None", ` +
				`"ReadWriteOnceWithFSType"`},
		kindstest.BadObject{Text: token("{audience: a}, {audience: a}"),
			Want: `spec.tokenRequests[1].audience: Duplicate value: "a"`},
		kindstest.BadObject{Text: token("{}, {}"), Want: `spec.tokenRequests[1].audience: Duplicate value: ""`},
		kindstest.BadObject{Text: token("{audience: a, expirationSeconds: 599}"),
			Want: "spec.tokenRequests[0].expirationSeconds: Invalid value: 599: may not specify a duration less " +
				"than 10 minutes"},
		kindstest.BadObject{Text: token("{audience: a, expirationSeconds: 4294967297}"),
			Want: "spec.tokenRequests[0].expirationSeconds: Invalid value: 4294967297: may not specify a duration " +
				"larger than 2^32 seconds"},
		kindstest.BadObject{Text: driver("nodeAllocatableUpdatePeriodSeconds: 9"),
			Want: "spec.nodeAllocatableUpdatePeriodSeconds: Invalid value: 9: must be greater than or " +
				"equal to 10 seconds"},
		kindstest.BadObject{Text: "{metadata: {name: X_io}}",
			Want: kindstest.InvalidText("metadata.name", "X_io", kindstest.NotSubdomain)},
	)
	kindstest.CheckChanges(t, driver(""),
		kindstest.Change[*storagev1.CSIDriver]{Change: func(d *storagev1.CSIDriver) {
			d.Spec.AttachRequired = new(false)
		},
			Want: "spec.attachedRequired: Invalid value: false: field is immutable"},
		kindstest.Change[*storagev1.CSIDriver]{Change: func(d *storagev1.CSIDriver) {
			d.Spec.VolumeLifecycleModes = []storagev1.VolumeLifecycleMode{"Ephemeral"}
		},
			Want: `spec.volumeLifecycleModes: Invalid value: ["Ephemeral"]: field is immutable`},
		kindstest.Change[*storagev1.CSIDriver]{Change: func(d *storagev1.CSIDriver) {
			d.Spec.PodInfoOnMount = new(true)
		}},
	)
}

func TestCSINodeRules(t *testing.T) {
	node := func(drivers string) string { return "{metadata: {name: n}, spec: {drivers: [" + drivers + "]}}" }
	const at = "spec.drivers[0]"
	kindstest.CheckRefused[*storagev1.CSINode](t,
		kindstest.BadObject{Text: node("{name: x.io, nodeID: i, topologyKeys: [a, b], allocatable: {count: 0}}"),
			Want: ""},
		kindstest.BadObject{Text: node("{nodeID: i}"), Want: at + ".name: Required value"},
		kindstest.BadObject{Text: node("{name: x_, nodeID: i}"),
			Want: kindstest.InvalidText(at+".name", "x_", kindstest.NotSubdomain)},
		kindstest.BadObject{Text: node("{name: " + strings.Repeat("a", 64) + ", nodeID: i}"),
			Want: at + ".name: Too long: may not be more than 63 bytes"},
		kindstest.BadObject{Text: node("{name: x}"), Want: at + ".nodeID: Required value"},
		kindstest.BadObject{Text: node("{name: x, nodeID: " + strings.Repeat("a", 257) + "}"),
			Want: kindstest.InvalidText(at+".nodeID", strings.Repeat("a", 257), "must be 256 characters or less")},
		kindstest.BadObject{Text: node("{name: x, nodeID: i, allocatable: {count: -1}}"),
			Want: at + ".allocatable.count: Invalid value: -1: must be greater than or equal to 0"},
		kindstest.BadObject{Text: node("{name: x, nodeID: i}, {name: x, nodeID: j}"),
			Want: `spec.drivers[1].name: Duplicate value: "x"`},
		kindstest.BadObject{Text: node("{name: x, nodeID: i, topologyKeys: ['']}"), Want: at + ": Required value"},
		kindstest.BadObject{Text: node("{name: x, nodeID: i, topologyKeys: [a, a]}"),
			Want: at + `: Duplicate value: "a"`},
		kindstest.BadObject{Text: node("{name: x, nodeID: i, topologyKeys: ['a b']}"),
			Want: kindstest.InvalidText(at, "a b", validation.IsQualifiedName("a b")[0])},
	)
	was := kindstest.Load[*storagev1.CSINode](t, node("{name: x, nodeID: i}"))
	now := was.DeepCopy()
	now.Spec.Drivers[0].Allocatable = &storagev1.VolumeNodeResources{Count: new(int32(4))}
	now.Spec.Drivers = append(now.Spec.Drivers, storagev1.CSINodeDriver{Name: "y", NodeID: "i"})
	k := kinds.All().ByType(was)
	was.ResourceVersion, now.ResourceVersion = "1", "1"
	if got := kindstest.JoinErrors(k.Validation.Update(now, was)); got != "" {
		t.Error(got)
	}
	now.Spec.Drivers[0].NodeID = "j"
	if got := kindstest.JoinErrors(k.Validation.Update(now, was)); !strings.HasPrefix(got,
		"spec.drivers: Invalid value: ") || !strings.HasSuffix(got, "field is immutable") {
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
	kindstest.CheckRefused[*storagev1.VolumeAttachment](t,
		kindstest.BadObject{Text: attachment("persistentVolumeName: v"), Want: ""},
		kindstest.BadObject{Text: inline(csi), Want: ""},
		kindstest.BadObject{Text: attachment(""),
			Want: at + ": Required value: must specify exactly one of inlineVolumeSpec and persistentVolumeName"},
		kindstest.BadObject{Text: attachment("persistentVolumeName: v, inlineVolumeSpec: {}"),
			Want: at + ": Forbidden: must specify exactly one of inlineVolumeSpec and persistentVolumeName"},
		kindstest.BadObject{Text: attachment("persistentVolumeName: ''"),
			Want: at + ".persistentVolumeName: Required value: must specify non empty persistentVolumeName"},
		kindstest.BadObject{Text: attachment("persistentVolumeName: V"),
			Want: kindstest.InvalidText(at+".persistentVolumeName", "V", kindstest.NotSubdomain)},
		kindstest.BadObject{Text: "{metadata: {name: a}, spec: {nodeName: n, source: {persistentVolumeName: v}}}",
			Want: "spec.attacher: Required value"},
		kindstest.BadObject{Text: "{metadata: {name: a}, spec: {attacher: a, source: {persistentVolumeName: v}}}",
			Want: kindstest.InvalidText("spec.nodeName", "", kindstest.NotSubdomain)},
		kindstest.BadObject{Text: inline("accessModes: [ReadWriteOnce]"),
			Want: at + ".inlineVolumeSpec.csi: Required value: has to be specified in the context of inline volumes"},
		kindstest.BadObject{Text: inline(csi + ", claimRef: {name: c}, capacity: {storage: 1}, storageClassName: s"),
			Want: at + ".inlineVolumeSpec.capacity" + context + "\n" +
				at + ".inlineVolumeSpec.claimRef" + context + "\n" + at +
				".inlineVolumeSpec.storageClassName" + context},
	)
	kindstest.CheckChanges(t, attachment("persistentVolumeName: v"),
		kindstest.Change[*storagev1.VolumeAttachment]{Sub: "status", Change: func(a *storagev1.VolumeAttachment) {
			a.Status.AttachError = &storagev1.VolumeError{Message: strings.Repeat("a", 1025), ErrorCode: new(int32(-1))}
			a.Status.AttachmentMetadata = map[string]string{"a": strings.Repeat("a", storage.MaxAttachmentSize)}
		}, Want: "status.attachmentMetadata: Too long: may not be more than 262144 " +
			"bytes\nstatus.attachError.message: Too long: may not be more than 1024 bytes\n" +
			"status.attachError.errorCode: Invalid value: -1: must be between 0 and 2147483647, inclusive"},
	)
}

func TestCSIStorageCapacity(t *testing.T) {
	capacity := func(rest string) string { return "{metadata: {name: a}, storageClassName: c, " + rest + "}" }
	kindstest.CheckRefused[*storagev1.CSIStorageCapacity](t,
		kindstest.BadObject{Text: capacity("capacity: 1Gi, nodeTopology: {matchLabels: {a: b}}"), Want: ""},
		kindstest.BadObject{Text: "{metadata: {name: a}}",
			Want: kindstest.InvalidText("storageClassName", "", kindstest.NotSubdomain)},
		kindstest.BadObject{Text: "{metadata: {name: a}, storageClassName: C}",
			Want: kindstest.InvalidText("storageClassName", "C", kindstest.NotSubdomain)},
		kindstest.BadObject{Text: capacity("capacity: -1"),
			Want: kindstest.InvalidText("capacity", "-1", "must be greater than or equal to 0")},
		kindstest.BadObject{Text: capacity("nodeTopology: {matchExpressions: [{key: a, operator: Near}]}"),
			Want: `nodeTopology.matchExpressions[0].operator: Invalid value: "Near": not a valid selector operator`},
		kindstest.BadObject{Text: capacity("nodeTopology: {matchExpressions: [{key: a, operator: Exists, values: " +
			"[b]}]}"), Want: "nodeTopology.matchExpressions[0].values: Forbidden: may not be specified when " +
			"`operator` is 'Exists' or 'DoesNotExist'"},
		kindstest.BadObject{Text: capacity("nodeTopology: {matchLabels: {a: 'b c'}}"),
			Want: kindstest.InvalidText("nodeTopology.matchLabels", "b c", validation.IsValidLabelValue("b c")[0])},
		kindstest.BadObject{Text: capacity("nodeTopology: {matchLabels: {'a b': c}}"),
			Want: kindstest.InvalidText("nodeTopology.matchLabels", "a b", validation.IsQualifiedName("a b")[0])},
		kindstest.BadObject{Text: "{metadata: {name: A}, storageClassName: c}",
			Want: kindstest.InvalidText("metadata.name", "A", kindstest.NotSubdomain)},
	)
	kindstest.CheckChanges(t, capacity("capacity: 1Gi"),
		kindstest.Change[*storagev1.CSIStorageCapacity]{Change: func(c *storagev1.CSIStorageCapacity) {
			c.Capacity = nil
		}},
		kindstest.Change[*storagev1.CSIStorageCapacity]{Change: func(c *storagev1.CSIStorageCapacity) {
			c.StorageClassName = "d"
		}, Want: kindstest.InvalidText("storageClassName", "d", "field is immutable")},
	)
	for text, want := range map[string]string{capacity("capacity: 1Gi"): "a|c|1Gi", capacity(""): "a|c|<unset>"} {
		if got := kindstest.PrintTable[*storagev1.CSIStorageCapacity](t, text); got !=
			"NAME|STORAGECLASSNAME|CAPACITY\n"+want {
			t.Error(got)
		}
	}
}

func TestVolumeAttributesClass(t *testing.T) {
	kindstest.CheckRefused[*storagev1.VolumeAttributesClass](t,
		kindstest.BadObject{Text: "{metadata: {name: a}, driverName: x.io, parameters: {a: b}}", Want: ""},
		kindstest.BadObject{Text: "{metadata: {name: a}, parameters: {a: b}}", Want: "driverName: Required value"},
		kindstest.BadObject{Text: "{metadata: {name: a}, driverName: 'x y', parameters: {a: b}}",
			Want: kindstest.InvalidText("driverName", "x y", validation.IsQualifiedName("x y")[0])},
		kindstest.BadObject{Text: "{metadata: {name: a}, driverName: x.io/a/b, parameters: {a: b}}",
			Want: kindstest.InvalidText("driverName", "x.io/a/b", validation.IsQualifiedName("a/b/c")[0])},
		kindstest.BadObject{Text: "{metadata: {name: a}, driverName: x.io}",
			Want: "parameters: Required value: must contain at least one key/value pair"},
		kindstest.BadObject{Text: "{metadata: {name: a}, driverName: x.io, parameters: {}}",
			Want: "parameters: Required value: must contain at least one key/value pair"},
		kindstest.BadObject{Text: "{metadata: {name: a}, driverName: x.io, parameters: {'': b}}",
			Want: kindstest.InvalidText("parameters", "", "field can not be empty.")},
		kindstest.BadObject{Text: "{metadata: {name: a}, driverName: x.io, parameters: {a: " +
			strings.Repeat("a", storage.MaxParametersSize) + "}}",
			Want: "parameters: Too long: may not be more than 262144 bytes"},
		kindstest.BadObject{Text: "{metadata: {name: A}, driverName: x.io, parameters: {a: b}}",
			Want: kindstest.InvalidText("metadata.name", "A", kindstest.NotSubdomain)},
	)
	kindstest.CheckChanges(t, "{metadata: {name: a}, driverName: x.io, parameters: {a: b}}",
		kindstest.Change[*storagev1.VolumeAttributesClass]{Change: func(c *storagev1.VolumeAttributesClass) {
			c.DriverName = "y.io"
		}, Want: "driverName: Forbidden: updates to driverName are forbidden."},
		kindstest.Change[*storagev1.VolumeAttributesClass]{Change: func(c *storagev1.VolumeAttributesClass) {
			c.Parameters["a"] = "c"
		}, Want: "parameters: Forbidden: updates to parameters are forbidden."},
	)
	if got := kindstest.PrintTable[*storagev1.VolumeAttributesClass](t,
		"{metadata: {name: a}, driverName: x.io}"); got != "NAME|DRIVERNAME|AGE\na|x.io|3h" {
		t.Error(got)
	}
}
