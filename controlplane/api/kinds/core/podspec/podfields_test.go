package podspec_test

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation"

	"keelson.dev/keelson/controlplane/api/kinds/kindstest"
)

// podWith returns a pod with one container and the given fields. podContainer returns a pod with
// the fields in its container.
func podWith(fields string) string {
	return "{metadata: {name: a}, spec: {containers: [{name: c, image: i}], " + fields + "}}"
}

func podContainer(fields string) string {
	return "{metadata: {name: a}, spec: {containers: [{name: c, image: i, " + fields + "}]}}"
}

// F38: names and enumerations of a pod, with the fields and texts of Kubernetes.
func TestPodNamesAndEnumerations(t *testing.T) {
	kindstest.CheckRefused[*corev1.Pod](t,
		kindstest.BadObject{Text: podWith("schedulerName: My_Scheduler"), Want: ""},
		kindstest.BadObject{Text: podWith("runtimeClassName: ''"),
			Want: kindstest.InvalidText("spec.runtimeClassName", "", kindstest.NotSubdomain)},
		kindstest.BadObject{Text: podWith("restartPolicy: Junk"),
			Want: `spec.restartPolicy: Unsupported value: "Junk": supported values: "Always", "OnFailure", "Never"`},
		kindstest.BadObject{Text: podWith("dnsPolicy: Junk"),
			Want: `spec.dnsPolicy: Unsupported value: "Junk": supported values: "ClusterFirstWithHostNet", ` +
				`"ClusterFirst", "Default", "None"`},
		kindstest.BadObject{Text: podWith("dnsPolicy: None"),
			Want: "spec.dnsConfig: Required value: must provide `dnsConfig` when `dnsPolicy` is None"},
		kindstest.BadObject{Text: podWith("schedulingGates: [{name: a}, {name: a}]"),
			Want: `spec.schedulingGates[1]: Duplicate value: "a"`},
		kindstest.BadObject{Text: podWith("tolerations: [{key: a, operator: Lt, value: '1'}]"),
			Want: `spec.tolerations[0].operator: Unsupported value: "Lt": supported values: "Equal", ` +
				`"Exists", "Lt", "Gt"`},
		kindstest.BadObject{Text: podWith("topologySpreadConstraints: [{maxSkew: 1, topologyKey: a b, " +
			"whenUnsatisfiable: DoNotSchedule}]"), Want: ""},
		kindstest.BadObject{Text: podWith("topologySpreadConstraints: [{maxSkew: 1, topologyKey: a, " +
			"whenUnsatisfiable: ''}]"),
			Want: `spec.topologySpreadConstraints[0].whenUnsatisfiable: Unsupported value: "": supported values: ` +
				`"DoNotSchedule", "ScheduleAnyway"`},
		kindstest.BadObject{Text: podWith("topologySpreadConstraints: [{maxSkew: 1, topologyKey: a, " +
			"whenUnsatisfiable: DoNotSchedule}, {maxSkew: 2, topologyKey: a, whenUnsatisfiable: DoNotSchedule}]"),
			Want: `spec.topologySpreadConstraints[0].{topologyKey, whenUnsatisfiable}: Duplicate value: "{a, ` +
				`DoNotSchedule}"`},
		kindstest.BadObject{Text: podWith("securityContext: {fsGroupChangePolicy: '', seLinuxChangePolicy: Junk}"),
			Want: `spec.securityContext.seLinuxChangePolicy: Unsupported value: "Junk": supported values: ` +
				`"MountOption", "Recursive"` + "\n" +
				`spec.securityContext.fsGroupChangePolicy: Unsupported value: "": supported values: "Always", ` +
				`"OnRootMismatch"`},
		kindstest.BadObject{Text: podWith("securityContext: {seccompProfile: {}, appArmorProfile: {}}"),
			Want: "spec.securityContext.appArmorProfile.type: Required value: type is required when " +
				"appArmorProfile is set\n" +
				"spec.securityContext.seccompProfile.type: Required value: type is required when " +
				"seccompProfile is set"},
		kindstest.BadObject{Text: podContainer("restartPolicy: '', restartPolicyRules: [{action: '', exitCodes: " +
			"{operator: ''}}]"),
			Want: `spec.containers[0].restartPolicy: Unsupported value: "": supported values: "Always", "Never", ` +
				`"OnFailure"` + "\n" +
				`spec.containers[0].restartPolicyRules[0].action: Unsupported value: "": supported ` +
				`values: "Restart", ` +
				`"RestartAllContainers"` + "\n" +
				`spec.containers[0].restartPolicyRules[0].exitCodes.operator: Unsupported value: "": supported ` +
				`values: "In", "NotIn"`},
	)
}

// F38: variables, mounts and headers of a container.
func TestContainerReferences(t *testing.T) {
	const env = "spec.containers[0].env[0].valueFrom.fieldRef"
	fieldRef := func(path string) string {
		return podContainer(`env: [{name: E, valueFrom: {fieldRef: {fieldPath: "` + path + `"}}}]`)
	}
	qualified := validation.IsQualifiedName("a b")[0]
	kindstest.CheckRefused[*corev1.Pod](t,
		kindstest.BadObject{Text: fieldRef("metadata.labels['A']"), Want: ""},
		kindstest.BadObject{Text: fieldRef("spec.oops"),
			Want: kindstest.InvalidText(env+".fieldPath", "spec.oops",
				"error converting fieldPath: field label not supported: spec.oops")},
		kindstest.BadObject{Text: fieldRef("metadata.labels['a b']"),
			Want: kindstest.InvalidText(env, "a b", qualified)},
		kindstest.BadObject{Text: podContainer("envFrom: [{}]"),
			Want: kindstest.InvalidText("spec.containers[0].envFrom", "",
				"must specify one of: `configMapRef` or `secretRef`")},
		kindstest.BadObject{Text: podContainer("envFrom: [{secretRef: {}}]"),
			Want: "spec.containers[0].envFrom[0].secretRef.name: Required value"},
		kindstest.BadObject{Text: podContainer("volumeMounts: [{mountPath: /v}]"),
			Want: "spec.containers[0].volumeMounts[0].name: Required value\n" +
				`spec.containers[0].volumeMounts[0].name: Not found: ""`},
		kindstest.BadObject{Text: podContainer("livenessProbe: {httpGet: {port: 1, httpHeaders: [{name: a b}]}}"),
			Want: kindstest.InvalidText("spec.containers[0].livenessProbe.httpGet.httpHeaders", "a b",
				validation.IsHTTPHeaderName("a b")[0])},
	)
}

// F38: huge pages come as whole pages, beside CPU or memory.
func TestHugePages(t *testing.T) {
	const r = "spec.containers[0].resources"
	limit := func(l string) string { return podContainer("resources: {limits: {" + l + "}}") }
	const multiple = " is not positive integer multiple of hugepages-2Mi"
	kindstest.CheckRefused[*corev1.Pod](t,
		kindstest.BadObject{Text: limit("hugepages-2Mi: 4Mi, cpu: 1"), Want: ""},
		kindstest.BadObject{Text: limit("hugepages-2Mi: 4Mi"),
			Want: r + ": Forbidden: HugePages require cpu or memory"},
		kindstest.BadObject{Text: limit("hugepages-2Mi: 3Mi, memory: 1Gi"),
			Want: kindstest.InvalidText(r+".limits[hugepages-2Mi]", "3Mi", "3Mi"+multiple) + "\n" +
				kindstest.InvalidText(r+".requests[hugepages-2Mi]", "3Mi", "3Mi"+multiple)},
	)
}

// F38: the options for Windows are judged in every pod.
func TestWindowsOptions(t *testing.T) {
	const at = "spec.securityContext.windowsOptions."
	user := func(name string) string {
		return podWith("securityContext: {windowsOptions: {runAsUserName: '" + name + "'}}")
	}
	wrong := func(name, shown, why string) kindstest.BadObject {
		return kindstest.BadObject{Text: user(name),
			Want: kindstest.InvalidText(at+"runAsUserName", shown, "runAsUserName"+why)}
	}
	const all = "If pod contains any hostProcess containers then all containers must be HostProcess containers"
	kindstest.CheckRefused[*corev1.Pod](t,
		kindstest.BadObject{Text: user(`NT AUTHORITY\SYSTEM`), Want: ""},
		kindstest.BadObject{Text: user(`example.com\a.b`), Want: ""},
		wrong("", "", " cannot be an empty string"),
		wrong(`a\b\c`, `a\\b\\c`, " cannot contain more than one backslash"),
		wrong(`a:b\c`, `a:b\\c`, "'s Domain doesn't match the NetBios nor the DNS format"),
		wrong(`a\`, `a\\`, "'s User cannot be empty"),
		wrong("..", "..", "'s User cannot contain only periods or spaces"),
		wrong("a/b", "a/b", `'s User cannot contain the following characters: "/\:;|=,+*?<>@[]`),
		kindstest.BadObject{Text: podWith("securityContext: {windowsOptions: {gmsaCredentialSpec: ''}}"),
			Want: kindstest.InvalidText(at+"gmsaCredentialSpec", "", "gmsaCredentialSpec cannot be an empty string")},
		kindstest.BadObject{Text: podWith("hostNetwork: true, securityContext: {windowsOptions: {hostProcess: true}}"),
			Want: ""},
		kindstest.BadObject{Text: podWith("securityContext: {windowsOptions: {hostProcess: true}}"),
			Want: "spec.hostNetwork: Invalid value: false: hostNetwork must be true if pod contains any " +
				"hostProcess containers"},
		kindstest.BadObject{Text: "{metadata: {name: a}, spec: {hostNetwork: true, containers: [{name: c, image: i}, " +
			"{name: d, image: i, securityContext: {windowsOptions: {hostProcess: true}}}]}}",
			Want: kindstest.InvalidText("spec", "", all)},
	)
}
