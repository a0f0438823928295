package resource_test

import (
	"fmt"
	"strings"
	"testing"

	resourcev1 "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/validate/content"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation"

	"keelson.dev/keelson/controlplane/api/kinds"
	"keelson.dev/keelson/controlplane/api/kinds/kindstest"
	"keelson.dev/keelson/controlplane/api/kinds/resource"
)

// claimFaults returns the errors that claims and claim templates can have. text returns an object
// with the devices, which are in the field at.
func claimFaults(text func(devices string) string, at string) []kindstest.BadObject {
	request := func(r string) string { return text("requests: [{name: r, " + r + "}]") }
	exactly := func(e string) string { return request("exactly: {deviceClassName: c, " + e + "}") }
	constraint := func(c string) string {
		return text("requests: [{name: r, exactly: {deviceClassName: c}}], constraints: [{" + c + "}]")
	}
	config := func(c string) string {
		return text("requests: [{name: r, exactly: {deviceClassName: c}}], config: [{" + c + "}]")
	}
	toleration := func(s string) string { return exactly("tolerations: [{" + s + "}]") }
	req, con, cfg := at+".requests[0]", at+".constraints[0]", at+".config[0]"
	tol := req + ".exactly.tolerations[0]"
	const missing = "must be the name of a request in the claim or the name of a request and a " +
		"subrequest separated by '/'"
	many := func(one string, n int) string { return strings.TrimSuffix(strings.Repeat(one+", ", n), ", ") }
	return []kindstest.BadObject{
		{Text: exactly("selectors: [{cel: {expression: 'true'}}]"), Want: ""},
		{Text: request("firstAvailable: [{name: a, deviceClassName: c}, {name: b, deviceClassName: c}]"), Want: ""},
		{Text: constraint("requests: [r], matchAttribute: x.io/a"), Want: ""},
		{Text: config("requests: [r], opaque: {driver: x.io, parameters: {a: b}}"), Want: ""},
		{Text: text("requests: [{name: R, exactly: {deviceClassName: c}}]"),
			Want: kindstest.InvalidText(req+".name", "R", kindstest.NotLabel)},
		{Text: request(""), Want: req + ": Required value: exactly one of `exactly` or `firstAvailable` is required"},
		{Text: request("exactly: {deviceClassName: c}, firstAvailable: [{name: a, deviceClassName: c}]"),
			Want: req + ": Invalid value: null: exactly one of `exactly` or `firstAvailable` is required, but " +
				"multiple fields are set"},
		{Text: request("exactly: {}"), Want: req + ".exactly.deviceClassName: Required value"},
		{Text: request("exactly: {deviceClassName: C}"),
			Want: kindstest.InvalidText(req+".exactly.deviceClassName", "C", kindstest.NotSubdomain)},
		{Text: request("firstAvailable: [{name: A}]"),
			Want: kindstest.InvalidText(req+".firstAvailable[0].name", "A", kindstest.NotLabel) + "\n" + req +
				".firstAvailable[0].deviceClassName: Required value"},
		{Text: request("firstAvailable: [" + many("{name: a, deviceClassName: c}", 2) + "]"),
			Want: req + `.firstAvailable[1]: Duplicate value: "a"`},
		{Text: request("firstAvailable: [" + many("{name: a, deviceClassName: c}", 9) + "]"),
			Want: req + ".firstAvailable: Too many: 9: must have at most 8 items"},
		{Text: text("requests: [" + many("{name: r, exactly: {deviceClassName: c}}", 2) + "]"),
			Want: at + `.requests[1]: Duplicate value: "r"`},
		{Text: text("requests: [" + many("{name: r, exactly: {deviceClassName: c}}", 33) + "]"),
			Want: at + ".requests: Too many: 33: must have at most 32 items"},
		{Text: exactly("allocationMode: Some"), Want: req +
			`.exactly.allocationMode: Unsupported value: "Some": supported values: "All", "ExactCount"`},
		{Text: exactly("allocationMode: All, count: 2"),
			Want: req + ".exactly.count: Invalid value: 2: must not be specified when allocationMode is 'All'"},
		{Text: exactly("count: -1"), Want: req + ".exactly.count: Invalid value: -1: must be greater than zero"},
		{Text: exactly("selectors: [{}]"), Want: req + ".exactly.selectors[0].cel: Required value"},
		{Text: exactly("selectors: [{cel: {}}]"), Want: req + ".exactly.selectors[0].cel.expression: Required value"},
		{Text: exactly("selectors: [{cel: {expression: " + strings.Repeat("a", 10241) + "}}]"),
			Want: req + ".exactly.selectors[0].cel.expression: Too long: may not be more than 10240 bytes"},
		{Text: exactly("selectors: [" + many("{cel: {expression: a}}", 33) + "]"),
			Want: req + ".exactly.selectors: Too many: 33: must have at most 32 items"},
		{Text: toleration("key: a b"), Want: kindstest.InvalidText(tol+".key", "a b",
			validation.IsQualifiedName("a b")[0])},
		{Text: toleration("operator: Near"), Want: tol +
			`.operator: Unsupported value: "Near": supported values: "Equal", "Exists"`},
		{Text: toleration("operator: Exists, value: v"),
			Want: kindstest.InvalidText(tol+".value", "v", "must be empty for operator `Exists`")},
		{Text: toleration("value: a b"), Want: kindstest.InvalidText(tol+".value", "a b",
			validation.IsValidLabelValue("a b")[0])},
		{Text: toleration("effect: Explode"), Want: tol +
			`.effect: Unsupported value: "Explode": supported values: "NoExecute", "NoSchedule", "None"`},
		{Text: constraint("requests: [r]"), Want: con +
			`: Required value: exactly one of "matchAttribute" or "distinctAttribute" is required`},
		{Text: constraint("matchAttribute: x.io/a, distinctAttribute: x.io/a"),
			Want: con + ": Invalid value: \"{`matchAttribute`, `distinctAttribute`}\": exactly one of " +
				"\"matchAttribute\" or \"distinctAttribute\" is required, but multiple fields are set"},
		{Text: constraint("matchAttribute: a"), Want: kindstest.InvalidText(con+".matchAttribute", "a",
			"a fully qualified name must be a domain and a name separated by a slash")},
		{Text: constraint("matchAttribute: x.io/1"),
			Want: kindstest.InvalidText(con+".matchAttribute", "1", content.IsCIdentifier("1")[0])},
		{Text: constraint("matchAttribute: x.io/a/b"), Want: ""},
		{Text: constraint("matchAttribute: x.io/a/" + strings.Repeat("b", 96)),
			Want: con + ".matchAttribute: Too long: may not be more than 96 bytes"},
		{Text: constraint("matchAttribute: /a"),
			Want: kindstest.InvalidText(con+".matchAttribute", "", "the domain must not be empty")},
		{Text: constraint("distinctAttribute: x.io/"),
			Want: kindstest.InvalidText(con+".distinctAttribute", "", "the name must not be empty")},
		{Text: constraint("requests: [s], matchAttribute: x.io/a"),
			Want: kindstest.InvalidText(con+".requests[0]", "s", missing)},
		{Text: constraint("requests: [r/s/t], matchAttribute: x.io/a"),
			Want: kindstest.InvalidText(con+".requests[0]", "r/s/t", missing)},
		{Text: text("requests: [{name: r, firstAvailable: [{name: a, deviceClassName: c}]}], " +
			"constraints: [{requests: [r/a, r/b], matchAttribute: x.io/a}]"),
			Want: kindstest.InvalidText(con+".requests[1]", "r/b", missing)},
		{Text: constraint("requests: [r, r], matchAttribute: x.io/a"),
			Want: con + `.requests[1]: Duplicate value: "r"`},
		{Text: config(""), Want: cfg + ".opaque: Required value"},
		{Text: config("opaque: {parameters: {}}"), Want: cfg + ".opaque.driver: Required value"},
		{Text: config("opaque: {driver: x.io}"), Want: cfg + ".opaque.parameters: Required value"},
		{Text: config("opaque: {driver: x.io, parameters: 5}"),
			Want: cfg + `.opaque.parameters: Invalid value: "<value omitted>": must be a valid JSON object`},
		{Text: config("opaque: {driver: x.io, parameters: {a: " + strings.Repeat("a", 10240) + "}}"),
			Want: cfg + ".opaque.parameters: Too long: may not be more than 10240 bytes"},
	}
}

func claim(devices string) string { return "{metadata: {name: a}, spec: {devices: {" + devices + "}}}" }

func TestResourceClaimValidation(t *testing.T) {
	kindstest.CheckRefused[*resourcev1.ResourceClaim](t, claimFaults(claim, "spec.devices")...)
	template := func(devices string) string {
		return "{metadata: {name: a}, spec: {spec: {devices: {" + devices + "}}}}"
	}
	kindstest.CheckRefused[*resourcev1.ResourceClaimTemplate](t, claimFaults(template, "spec.spec.devices")...)
	kindstest.CheckRefused[*resourcev1.ResourceClaimTemplate](t,
		kindstest.BadObject{Text: "{metadata: {name: a}, spec: {metadata: {labels: {a b: c}, annotations: {c d: e}}}}",
			Want: kindstest.InvalidText("spec.metadata.annotations", "c d", validation.IsQualifiedName("c d")[0]) +
				"\n" +
				kindstest.InvalidText("spec.metadata.labels", "a b", validation.IsQualifiedName("a b")[0])})
	kindstest.CheckDefaults[*resourcev1.ResourceClaim](t,
		claim("requests: [{name: r, exactly: {deviceClassName: c, tolerations: [{key: k}]}}, {name: s, "+
			"firstAvailable: [{name: t, deviceClassName: c, allocationMode: All}]}]"),
		claim("requests: [{name: r, exactly: {deviceClassName: c, allocationMode: ExactCount, count: 1, tolerations: "+
			"[{key: k, operator: Equal}]}}, {name: s, firstAvailable: [{name: t, deviceClassName: c, "+
			"allocationMode: All}]}]"))
	kindstest.CheckChanges(t, template("requests: [{name: r, exactly: {deviceClassName: c}}]"),
		kindstest.Change[*resourcev1.ResourceClaimTemplate]{Change: func(c *resourcev1.ResourceClaimTemplate) {
			c.Labels = map[string]string{"a": "b"}
		}})
}

var resourceClaimStatusResult = resourcev1.DeviceRequestAllocationResult{Request: "r", Driver: "x.io",
	Pool: "p", Device: "d"}

func resourceClaimStatusAllocate(c *resourcev1.ResourceClaim, change func(*resourcev1.DeviceRequestAllocationResult)) {
	r := resourceClaimStatusResult
	if change != nil {
		change(&r)
	}
	c.Status.Allocation = &resourcev1.AllocationResult{
		Devices: resourcev1.DeviceAllocationResult{Results: []resourcev1.DeviceRequestAllocationResult{r}}}
}

func resourceClaimStatusWith(change func(*resourcev1.DeviceRequestAllocationResult)) func(*resourcev1.ResourceClaim) {
	return func(c *resourcev1.ResourceClaim) { resourceClaimStatusAllocate(c, change) }
}

func resourceClaimStatusReserve(c *resourcev1.ResourceClaim, uids ...string) {
	for _, u := range uids {
		c.Status.ReservedFor = append(c.Status.ReservedFor,
			resourcev1.ResourceClaimConsumerReference{Resource: "pods", Name: "p", UID: types.UID(u)})
	}
}

func resourceClaimStatusDevice(d resourcev1.AllocatedDeviceStatus) func(*resourcev1.ResourceClaim) {
	return func(c *resourcev1.ResourceClaim) {
		resourceClaimStatusAllocate(c, nil)
		c.Status.Devices = []resourcev1.AllocatedDeviceStatus{d}
	}
}

const resourceClaimStatusRes, resourceClaimStatusDev = "status.allocation.devices.results[0]", "status.devices[0]"

// resourceClaimStatusCases are the cases of TestResourceClaimStatus.
var resourceClaimStatusCases = []kindstest.Change[*resourcev1.ResourceClaim]{
	{Sub: "status", Change: func(c *resourcev1.ResourceClaim) {
		resourceClaimStatusAllocate(c, nil)
		resourceClaimStatusReserve(c, "1", "2")
		c.Spec.Devices.Requests = nil
	}},
	{Sub: "status", Change: resourceClaimStatusDevice(resourcev1.AllocatedDeviceStatus{Driver: "x.io", Pool: "p",
		Device: "d"})},
	{Change: func(c *resourcev1.ResourceClaim) {
		c.Labels = map[string]string{"a": "b"}
		resourceClaimStatusReserve(c, "1")
	}},
	{Sub: "status", Change: func(c *resourcev1.ResourceClaim) {
		resourceClaimStatusReserve(c, "1")
	}, Want: "status.reservedFor: Forbidden: may not be specified when `allocated` is not set"},
	{Sub: "status", Change: func(c *resourcev1.ResourceClaim) {
		resourceClaimStatusAllocate(c, nil)
		resourceClaimStatusReserve(c, "1", "1")
	}, Want: `status.reservedFor[1]: Duplicate value: "1"`},
	{Sub: "status", Change: func(c *resourcev1.ResourceClaim) {
		resourceClaimStatusAllocate(c, nil)
		c.Status.ReservedFor = []resourcev1.ResourceClaimConsumerReference{{}}
	}, Want: "status.reservedFor[0].resource: Required value\nstatus.reservedFor[0].name: Required " +
		"value\nstatus.reservedFor[0].uid: Required value"},
	{Sub: "status", Change: resourceClaimStatusWith(func(r *resourcev1.DeviceRequestAllocationResult) {
		r.Request = "s"
	}),
		Want: kindstest.InvalidText(resourceClaimStatusRes+".request", "s",
			"must be the name of a request in the claim or the name of a request and a subrequest "+
				"separated by '/'")},
	{Sub: "status", Change: resourceClaimStatusWith(func(r *resourcev1.DeviceRequestAllocationResult) {
		r.Driver, r.Pool, r.Device = "", "", "D"
	}),
		Want: resourceClaimStatusRes + ".driver: Required value\n" + resourceClaimStatusRes +
			".pool: Required value\n" +
			kindstest.InvalidText(resourceClaimStatusRes+".device", "D", kindstest.NotLabel)},
	{Sub: "status", Change: resourceClaimStatusWith(func(r *resourcev1.DeviceRequestAllocationResult) {
		r.Pool = "a//b"
	}), Want: kindstest.InvalidText(resourceClaimStatusRes+".pool", "", kindstest.NotSubdomain)},
	{Sub: "status", Change: resourceClaimStatusWith(func(r *resourcev1.DeviceRequestAllocationResult) {
		r.ShareID = new(types.UID("X"))
	}),
		Want: kindstest.InvalidText(resourceClaimStatusRes+".shareID", "X",
			"uid must be in RFC 4122 normalized form, `xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx` with lowercase "+
				"hexadecimal characters")},
	{Sub: "status", Change: resourceClaimStatusWith(func(r *resourcev1.DeviceRequestAllocationResult) {
		r.BindingConditions, r.BindingFailureConditions = []string{"a"}, []string{"a"}
	}), Want: kindstest.InvalidText(resourceClaimStatusRes+".bindingFailureConditions[0]", "a",
		"bindingFailureConditions must not overlap with bindingConditions")},
	{Sub: "status", Change: resourceClaimStatusWith(func(r *resourcev1.DeviceRequestAllocationResult) {
		r.BindingConditions = []string{"a"}
	}),
		Want: resourceClaimStatusRes + ".bindingFailureConditions: Invalid value: null: bindingFailureConditions are " +
			"required to use bindingConditions"},
	{Sub: "status", Change: resourceClaimStatusWith(func(r *resourcev1.DeviceRequestAllocationResult) {
		r.SkipNodeOperations = []resourcev1.SkipNodeOperation{"NodePrepareResources"}
	}), Want: resourceClaimStatusRes + `.skipNodeOperations: Invalid value: ["NodePrepareResources"]: ` +
		`NodePrepareResources cannot be ` +
		`skipped unless NodeUnprepareResources is also skipped`},
	{Sub: "status", Change: func(c *resourcev1.ResourceClaim) {
		resourceClaimStatusAllocate(c, nil)
		c.Status.Allocation.Devices.Config = []resourcev1.DeviceAllocationConfiguration{{Source: "FromSky",
			DeviceConfiguration: resourcev1.DeviceConfiguration{
				Opaque: &resourcev1.OpaqueDeviceConfiguration{Driver: "x",
					Parameters: runtime.RawExtension{Raw: []byte("{}")}}}}}
	}, Want: `status.allocation.devices.config[0].source: Unsupported value: "FromSky": supported values: ` +
		`"FromClaim", "FromClass"`},
	{Sub: "status", Change: resourceClaimStatusDevice(resourcev1.AllocatedDeviceStatus{Driver: "x.io", Pool: "p",
		Device: "e"}), Want: kindstest.InvalidText(resourceClaimStatusDev, "x.io/p/e",
		"must be an allocated device in the claim")},
	{Sub: "status", Change: resourceClaimStatusDevice(resourcev1.AllocatedDeviceStatus{Driver: "x.io", Pool: "p",
		Device: "d", Data: &runtime.RawExtension{Raw: []byte("[]")}}),
		Want: resourceClaimStatusDev + `.data: Invalid value: "<value omitted>": must be a valid JSON object`},
	{Sub: "status", Change: resourceClaimStatusDevice(resourcev1.AllocatedDeviceStatus{Driver: "x.io", Pool: "p",
		Device: "d", NetworkData: &resourcev1.NetworkDeviceData{
			InterfaceName: strings.Repeat("a", 257), HardwareAddress: strings.Repeat("a", 129),
			IPs: []string{"10.0.0.1/24", "10.0.0.1/24"}}}),
		Want: resourceClaimStatusDev + ".networkData.interfaceName: Too long: may not be more than 256 bytes\n" +
			resourceClaimStatusDev +
			".networkData.hardwareAddress: Too long: may not be more than 128 bytes\n" + resourceClaimStatusDev +
			`.networkData.ips[1]: Duplicate value: "10.0.0.1/24"`},
}

func TestResourceClaimStatus(t *testing.T) {
	const request = "requests: [{name: r, exactly: {deviceClassName: c}}]"

	kindstest.CheckChanges(t, claim(request),
		resourceClaimStatusCases...)
	// The allocation cannot change, and a claim that is being deleted cannot be reserved for
	// further consumers.
	old := kindstest.Load[*resourcev1.ResourceClaim](t, claim(request))
	old.ResourceVersion = "1"
	resourceClaimStatusAllocate(old, nil)
	resourceClaimStatusReserve(old, "1")
	now := old.DeepCopy()
	now.DeletionTimestamp = &metav1.Time{Time: kindstest.Now}
	resourceClaimStatusReserve(now, "2")
	now.Status.Allocation.Devices.Results[0].Device = "e"
	got := kindstest.JoinErrors(resource.ValidateClaimStatus(now, old, nil))
	if !strings.Contains(got, "new entries may not be added while") || !strings.HasSuffix(got, "field is immutable") {
		t.Error(got)
	}
	for want, c := range map[string]*resourcev1.ResourceClaim{"pending": kindstest.Load[*resourcev1.ResourceClaim](t,
		claim(request)), "allocated,reserved": old,
		"deleted,allocated,reserved": now} {
		if got := resource.ClaimState(c); got != want {
			t.Errorf("%s, not %s", got, want)
		}
	}
	if got := kindstest.PrintTable[*resourcev1.ResourceClaim](t, claim(request)); got !=
		"NAME|STATE|AGE\na|pending|3h" {
		t.Error(got)
	}
	k := kinds.All().ByType(old)
	// The status of a device is removed with its allocation.
	used := old.DeepCopy()
	used.Status.Devices = []resourcev1.AllocatedDeviceStatus{{Driver: "x.io", Pool: "p", Device: "d"}}
	free := used.DeepCopy()
	free.Status.Allocation, free.Status.ReservedFor = nil, nil
	k.Subresources["status"].PrepareUpdate(free, used)
	if errs := k.Subresources["status"].ValidateUpdate(free, used); len(errs) > 0 || free.Status.Devices != nil {
		t.Errorf("deallocated: %v, devices %v", errs, free.Status.Devices)
	}
	now = old.DeepCopy()
	now.Spec.Devices.Requests[0].Name = "s"
	if got := kindstest.JoinErrors(k.Validation.Update(now, old)); !strings.HasPrefix(got, "spec: Invalid value: ") ||
		!strings.HasSuffix(got, "field is immutable") {
		t.Error(got)
	}
}

func TestDerivedAttributes(t *testing.T) {
	text := func(derived, constraints string) string {
		return claim("requests: [{name: r, exactly: {deviceClassName: c, derivedAttributes: [" + derived +
			"]}}], constraints: [" + constraints + "]")
	}
	const at = "spec.devices.requests[0].exactly.derivedAttributes[0]"
	kindstest.CheckRefused[*resourcev1.ResourceClaim](t,
		kindstest.BadObject{Text: text("{name: x.io/a, expression: '1'}", "{requests: [r], matchAttribute: x.io/a}"),
			Want: ""},
		kindstest.BadObject{Text: text("{name: x.io/a, expression: '1'}", "{distinctAttribute: x.io/a}"), Want: ""},
		kindstest.BadObject{Text: text("{expression: '1'}", ""), Want: at + ".name: Required value"},
		kindstest.BadObject{Text: text("{name: x.io/a, expression: '1'}", ""),
			Want: kindstest.InvalidText(at+".name", "x.io/a",
				"must be referenced by at least one matchAttribute or distinctAttribute constraint "+
					"targeting this request")},
		kindstest.BadObject{Text: text("{name: x.io/a}", "{matchAttribute: x.io/a}"),
			Want: at + ".expression: Required value"},
	)
}

func TestDeviceClass(t *testing.T) {
	class := func(spec string) string { return "{metadata: {name: a}, spec: {" + spec + "}}" }
	config := func(c string) string { return class("config: [{" + c + "}]") }
	extended := func(n string) kindstest.BadObject {
		return kindstest.BadObject{Text: class("extendedResourceName: " + n),
			Want: kindstest.InvalidText("spec.extendedResourceName", n, "must be a valid extended resource name")}
	}
	kindstest.CheckRefused[*resourcev1.DeviceClass](t,
		kindstest.BadObject{Text: class("selectors: [{cel: {expression: 'true'}}], extendedResourceName: x.io/gpu"),
			Want: ""},
		kindstest.BadObject{Text: class("selectors: [{}]"), Want: "spec.selectors[0].cel: Required value"},
		kindstest.BadObject{Text: class("selectors: [{cel: {expression: ' '}}]"),
			Want: "spec.selectors[0].cel.expression: Required value"},
		kindstest.BadObject{Text: config(""), Want: "spec.config[0].opaque: Required value"},
		kindstest.BadObject{Text: config("opaque: {driver: x_, parameters: {}}"),
			Want: kindstest.InvalidText("spec.config[0].opaque.driver", "x_", kindstest.NotSubdomain)},
		kindstest.BadObject{Text: config("opaque: {driver: x, parameters: [1]}"),
			Want: `spec.config[0].opaque.parameters: Invalid value: "<value omitted>": must be a valid JSON object`},
		extended("gpu"), extended("kubernetes.io/gpu"), extended("requests.x/gpu"), extended("x.io/a/b"),
		kindstest.BadObject{Text: "{metadata: {name: A}}",
			Want: kindstest.InvalidText("metadata.name", "A", kindstest.NotSubdomain)},
	)
	kindstest.CheckChanges(t, class(""),
		kindstest.Change[*resourcev1.DeviceClass]{Change: func(c *resourcev1.DeviceClass) {
			c.Spec.ExtendedResourceName = new("x.io/y")
		}, Generation: 2},
		kindstest.Change[*resourcev1.DeviceClass]{Change: func(c *resourcev1.DeviceClass) {
			c.Labels = map[string]string{"a": "b"}
		}, Generation: 1})
	for _, got := range []string{kindstest.PrintTable[*resourcev1.DeviceClass](t, class("")),
		kindstest.PrintTable[*resourcev1.ResourceClaimTemplate](t, "{metadata: {name: a}}")} {
		if got != "NAME|AGE\na|3h" {
			t.Error(got)
		}
	}
}

func resourceSliceValidationSlice(rest string) string {
	return "{metadata: {name: a}, spec: {driver: x.io, pool: {name: p, resourceSliceCount: 1}, " + rest + "}}"
}

func resourceSliceValidationDevices(list string) string {
	return resourceSliceValidationSlice("nodeName: w, devices: [" + list + "]")
}

func resourceSliceValidationDevice(rest string) string {
	return resourceSliceValidationDevices("{name: d, " + rest + "}")
}

func resourceSliceValidationPer(rest string) string {
	return resourceSliceValidationSlice("perDeviceNodeSelection: true, devices: [{name: d, " + rest + "}]")
}

func resourceSliceValidationAttribute(a string) string {
	return resourceSliceValidationDevice("attributes: {a: {" + a + "}}")
}

func resourceSliceValidationPolicy(p string) string {
	return resourceSliceValidationDevice("allowMultipleAllocations: true, capacity: {a: {value: 10, requestPolicy: {" +
		p + "}}}")
}

func resourceSliceValidationWithin(r string) string {
	return resourceSliceValidationPolicy("default: 4, validRange: {" + r + "}")
}

func resourceSliceValidationMany(n int, one string) string {
	var out []string
	for i := range n {
		out = append(out, fmt.Sprintf(one, i))
	}
	return strings.Join(out, ", ")
}

const resourceSliceValidationAt = "spec.devices[0]"

const resourceSliceValidationAttr, resourceSliceValidationCap = resourceSliceValidationAt + ".attributes[a]",
	resourceSliceValidationAt + ".capacity[a].requestPolicy"

const resourceSliceValidationOne = "exactly one of `nodeName`, `nodeSelector`, `allNodes`, " +
	"`perDeviceNodeSelection` is required"

const resourceSliceValidationEach1 = "exactly one of `nodeName`, `nodeSelector`, or `allNodes` is required when " +
	"`perDeviceNodeSelection` is set to true in the ResourceSlice spec"

// resourceSliceValidationCases are the cases of TestResourceSliceValidation.
var resourceSliceValidationCases = []kindstest.BadObject{
	{Text: resourceSliceValidationDevice("attributes: {a: {string: b}, x.io/c: {version: 1.2.3-rc.1+b}}, capacity: " +
		"{m: {value: 1Gi}}, taints: [{key: k, effect: NoSchedule}]"), Want: ""},
	{Text: resourceSliceValidationPer("allNodes: true"), Want: ""},
	{Text: resourceSliceValidationPolicy("default: 4, validValues: [2, 4]"), Want: ""},
	{Text: resourceSliceValidationWithin("min: 2, max: 8, step: 2"), Want: ""},
	{Text: "{metadata: {name: a}, spec: {nodeName: n, pool: {resourceSliceCount: 0, " +
		"generation: -1}}}", Want: "spec.driver: Required value\nspec.pool.name: Required value\n" +
		"spec.pool.resourceSliceCount: Invalid value: 0: must be greater than " +
		"zero\nspec.pool.generation: Invalid value: -1: must be greater than or equal to zero"},
	{Text: resourceSliceValidationSlice(""), Want: "spec: Required value: " + resourceSliceValidationOne},
	{Text: resourceSliceValidationSlice("nodeName: n, allNodes: true"),
		Want: "spec: Invalid value: \"{`nodeName`, `allNodes`}\": " + resourceSliceValidationOne +
			", but multiple fields are set"},
	{Text: resourceSliceValidationSlice("nodeName: ''"),
		Want: kindstest.InvalidText("spec.nodeName", "", "must be either unset or set to a non-empty string") +
			"\nspec: Required value: " + resourceSliceValidationOne},
	{Text: resourceSliceValidationSlice("nodeName: W_1"),
		Want: kindstest.InvalidText("spec.nodeName", "W_1", kindstest.NotSubdomain)},
	{Text: resourceSliceValidationSlice("allNodes: false"),
		Want: "spec.allNodes: Invalid value: false: must be either unset or set to true\nspec: Required value: " +
			resourceSliceValidationOne},
	{Text: resourceSliceValidationSlice("nodeSelector: {}"),
		Want: "spec.nodeSelector.nodeSelectorTerms: Required value: must have at least one node selector term\n" +
			"spec.nodeSelector.nodeSelectorTerms: Invalid value: null: must have exactly one node selector term"},
	{Text: resourceSliceValidationSlice("nodeName: n, sharedCounters: [{name: s, counters: {c: {value: 1}}}], " +
		"devices: []"), Want: `spec: Invalid value: "": only one of ` + "`sharedCounters` or `devices` is allowed"},
	{Text: resourceSliceValidationSlice("nodeName: n, sharedCounters: [{counters: {C: {value: 1}}}, {name: s}]"),
		Want: "spec.sharedCounters[0].name: Required value\n" +
			kindstest.InvalidText("spec.sharedCounters[0].counters", "C", kindstest.NotLabel) +
			"\nspec.sharedCounters[1].counters: Required value"},
	{Text: resourceSliceValidationDevices("{name: D}"),
		Want: kindstest.InvalidText(resourceSliceValidationAt+".name", "D", kindstest.NotLabel)},
	{Text: resourceSliceValidationDevices("{name: d}, {name: d}"), Want: `spec.devices[1]: Duplicate value: "d"`},
	{Text: resourceSliceValidationDevices(resourceSliceValidationMany(129, "{name: d%d}")),
		Want: "spec.devices: Too many: 129: must have at most 128 items"},
	{Text: resourceSliceValidationDevices(resourceSliceValidationMany(65,
		"{name: d%d, taints: [{key: k, effect: NoSchedule}]}")),
		Want: "spec.devices: Too many: 65: must have at most 64 items"},
	{Text: resourceSliceValidationAttribute(""),
		Want: kindstest.InvalidText(resourceSliceValidationAttr, "", "exactly one value must be specified")},
	{Text: resourceSliceValidationAttribute("int: 1, bool: true"),
		Want: resourceSliceValidationAttr + `: Invalid value: {"int":1,"bool":true}: exactly one value ` +
			`must be specified`},
	{Text: resourceSliceValidationAttribute("version: v1"),
		Want: kindstest.InvalidText(resourceSliceValidationAttr+".version", "v1",
			"must be a string compatible with semver.org spec 2.0.0")},
	{Text: resourceSliceValidationAttribute("string: " + strings.Repeat("a", 65)),
		Want: resourceSliceValidationAttr + ".string: Too long: may not be more than 64 bytes"},
	{Text: resourceSliceValidationAttribute("strings: []"),
		Want: resourceSliceValidationAttr + `.strings: Invalid value: []: must not be empty if specified`},
	{Text: resourceSliceValidationDevice("attributes: {1a: {int: 1}}"),
		Want: kindstest.InvalidText(resourceSliceValidationAt+".attributes", "1a", content.IsCIdentifier("1a")[0])},
	{Text: resourceSliceValidationDevice("attributes: {" + strings.Repeat("a", 33) + ": {int: 1}}"),
		Want: resourceSliceValidationAt + ".attributes: Too long: may not be more than 32 bytes"},
	{Text: resourceSliceValidationDevice("attributes: {" + resourceSliceValidationMany(33, "a%d: {int: 1}") + "}"),
		Want: resourceSliceValidationAt + ": Invalid value: 33: the total number of attributes and capacities " +
			"must not exceed 32"},
	{Text: resourceSliceValidationDevice("attributes: {a: {ints: [" + resourceSliceValidationMany(49, "%d") + "]}}"),
		Want: resourceSliceValidationAt + ": Invalid value: 49: the total number of attribute values " +
			"must not exceed 48"},
	{Text: resourceSliceValidationDevice("capacity: {a: {value: 1, requestPolicy: {}}}"),
		Want: resourceSliceValidationCap + ": Forbidden: allowMultipleAllocations must be true"},
	{Text: resourceSliceValidationPolicy("validValues: [1]"),
		Want: resourceSliceValidationCap + ".default: Required value: required when validValues is defined"},
	{Text: resourceSliceValidationPolicy("validRange: {}"),
		Want: resourceSliceValidationCap + ".default: Required value: required when validRange is defined"},
	{Text: resourceSliceValidationPolicy("default: 1, validValues: [1], validRange: {}"),
		Want: resourceSliceValidationCap + `: Forbidden: exactly one policy can be specified, cannot specify ` +
			`"validValues" and ` +
			`"validRange" at the same time`},
	{Text: resourceSliceValidationPolicy("default: 3, validValues: [20, 2, 2]"),
		Want: kindstest.InvalidText(resourceSliceValidationCap+".validValues[1]", "2",
			"values must be sorted in ascending order") + "\n" +
			kindstest.InvalidText(resourceSliceValidationCap+".validValues[0]", "20",
				"option is larger than capacity value: 10") + "\n" +
			resourceSliceValidationCap + `.validValues[2]: Duplicate value: "2"` + "\n" +
			kindstest.InvalidText(resourceSliceValidationCap+".validValues", "3",
				"default value is not valid according to the requestPolicy")},
	{Text: resourceSliceValidationWithin(""), Want: resourceSliceValidationCap +
		".validRange.min: Required value: required when validRange is defined"},
	{Text: resourceSliceValidationWithin("min: 5, max: 3"),
		Want: kindstest.InvalidText(resourceSliceValidationCap+".validRange.min", "4", "default is less than min: 5") +
			"\n" +
			kindstest.InvalidText(resourceSliceValidationCap+".validRange.max", "5", "min is larger than max: 3") +
			"\n" +
			kindstest.InvalidText(resourceSliceValidationCap+".validRange.max", "4", "default is more than max: 3")},
	{Text: resourceSliceValidationWithin("min: 1, step: 2"),
		Want: kindstest.InvalidText(resourceSliceValidationCap+".validRange.step", "4",
			"value is not a multiple of a given step (2) from (1)")},
	{Text: resourceSliceValidationWithin("min: 0, step: 0"),
		Want: kindstest.InvalidText(resourceSliceValidationCap+".validRange.step", "0", "must be greater than zero")},
	{Text: resourceSliceValidationWithin("min: 0, step: 1u"),
		Want: kindstest.InvalidText(resourceSliceValidationCap+".validRange.step", "1u",
			"value cannot be represented as a milli value")},
	{Text: resourceSliceValidationDevice("taints: [{effect: Sad}]"),
		Want: resourceSliceValidationAt + ".taints[0].key: Invalid value: \"\": " + validation.IsQualifiedName("")[0] +
			"\n" + resourceSliceValidationAt +
			".taints[0].key: Invalid value: \"\": " + validation.IsQualifiedName("")[1] + "\n" +
			resourceSliceValidationAt + `.taints[0].effect: Unsupported value: "Sad": supported values: "NoExecute", ` +
			`"NoSchedule", "None"`},
	{Text: resourceSliceValidationDevice("taints: [{key: k}]"),
		Want: resourceSliceValidationAt + ".taints[0].effect: Required value"},
	{Text: resourceSliceValidationDevice("consumesCounters: [{}]"),
		Want: resourceSliceValidationAt + ".consumesCounters[0].counterSet: Required value\n" +
			resourceSliceValidationAt +
			".consumesCounters[0].counters: Required value"},
	{Text: resourceSliceValidationDevice("allNodes: true"),
		Want: resourceSliceValidationAt + ": Invalid value: null: `nodeName`, `nodeSelector` and `allNodes` can " +
			"only be set if `perDeviceNodeSelection` is set to true in the ResourceSlice spec"},
	{Text: resourceSliceValidationPer(""), Want: resourceSliceValidationAt + ": Required value: " +
		resourceSliceValidationEach1},
	{Text: resourceSliceValidationPer("nodeName: n, allNodes: true"),
		Want: resourceSliceValidationAt + ": Invalid value: \"{`nodeName`, `allNodes`}\": " +
			resourceSliceValidationEach1},
	{Text: resourceSliceValidationDevice("bindingFailureConditions: [a]"),
		Want: resourceSliceValidationAt + ".bindingConditions: Invalid value: null: bindingConditions are " +
			"required to use bindingFailureConditions"},
	{Text: resourceSliceValidationDevice("nodeAllocatableResources: {beans: {}}"),
		Want: kindstest.InvalidText(resourceSliceValidationAt+".nodeAllocatableResources[beans]", "beans",
			"must be a node allocatable resource name") + "\n" + resourceSliceValidationAt +
			".nodeAllocatableResources[beans]: Required value: at least one of mapping or overhead must be set"},
	{Text: resourceSliceValidationDevice("nodeAllocatableResources: {cpu: {mapping: {capacityKey: k}, overhead: {}}}"),
		Want: resourceSliceValidationAt + `.nodeAllocatableResources[cpu].mapping.capacityKey: Not found: "k"` + "\n" +
			resourceSliceValidationAt + ".nodeAllocatableResources[cpu].mapping.capacityMultiplier: Required value: " +
			"capacityMultiplier is required when capacityKey is set\n" +
			kindstest.InvalidText(resourceSliceValidationAt+".nodeAllocatableResources[cpu].overhead", "",
				"at least one of perPod or perContainer must be set")},
	{Text: resourceSliceValidationSlice("nodeName: n, partitionTypeAttribute: x.io/t, devices: [{name: d}]"),
		Want: kindstest.InvalidText("spec.partitionTypeAttribute", "x.io/t",
			"may only be set on a slice which declares devices that consume counters")},
	{Text: resourceSliceValidationSlice("nodeName: n, partitionTypeAttribute: x.io/t, devices: [{name: d, " +
		"consumesCounters: [{counterSet: s, counters: {c: {value: 1}}}]}]"),
		Want: resourceSliceValidationAt + ".attributes[x.io/t]: Required value: device consumes counters and " +
			"`partitionTypeAttribute` names this attribute, so it must be set"},
	{Text: resourceSliceValidationSlice("nodeName: n, skipNodeOperations: [Sleep]"),
		Want: `spec.skipNodeOperations[0]: Unsupported value: "Sleep": supported values: "*", ` +
			`"NodePrepareResources", "NodeUnprepareResources"`},
}

func TestResourceSliceValidation(t *testing.T) {
	kindstest.CheckRefused[*resourcev1.ResourceSlice](t,
		resourceSliceValidationCases...)
	kindstest.CheckChanges(t, resourceSliceValidationDevices("{name: d}"),
		kindstest.Change[*resourcev1.ResourceSlice]{Change: func(s *resourcev1.ResourceSlice) {
			s.Spec.Devices = nil
		}, Generation: 2},
		kindstest.Change[*resourcev1.ResourceSlice]{Change: func(s *resourcev1.ResourceSlice) {
			s.Spec.Driver, s.Spec.Pool.Name, s.Spec.NodeName = "y.io", "q", new("m")
		},
			Want: kindstest.InvalidText("spec.pool.name", "q", "field is immutable") + "\n" +
				kindstest.InvalidText("spec.driver", "y.io", "field is immutable") + "\n" +
				kindstest.InvalidText("spec.nodeName", "m", "field is immutable"), Generation: 2})
	if got := kindstest.PrintTable[*resourcev1.ResourceSlice](t, resourceSliceValidationDevices("")); got !=
		"NAME|NODE|DRIVER|POOL|AGE\na|w|x.io|p|3h" {
		t.Error(got)
	}
	s := kindstest.Load[*resourcev1.ResourceSlice](t, resourceSliceValidationDevices(""))
	if got := kinds.All().ByType(s).Lists.Fields(s).String(); got !=
		"spec.driver=x.io,spec.nodeName=w,spec.pool.name=p" {
		t.Error(got)
	}
}
