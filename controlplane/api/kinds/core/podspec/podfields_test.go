package podspec_test

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation"

	"keelson.dev/keelson/controlplane/api/kinds/kindstest"
)

// podWith is a pod with one container and the given fields, podContainer one whose container has them.
func podWith(fields string) string {
	return "{metadata: {name: a}, spec: {containers: [{name: c, image: i}], " + fields + "}}"
}

func podContainer(fields string) string {
	return "{metadata: {name: a}, spec: {containers: [{name: c, image: i, " + fields + "}]}}"
}

// F38: names and enumerations of a pod, with the fields and texts of Kubernetes.
func TestPodNamesAndEnumerations(t *testing.T) {
	kindstest.CheckRefused[*corev1.Pod](t,
		kindstest.BadObject{podWith("schedulerName: My_Scheduler"), ""},
		kindstest.BadObject{podWith("runtimeClassName: ''"), kindstest.InvalidText("spec.runtimeClassName", "", kindstest.NotSubdomain)},
		kindstest.BadObject{podWith("restartPolicy: Junk"), `spec.restartPolicy: Unsupported value: "Junk": supported values: "Always", "OnFailure", "Never"`},
		kindstest.BadObject{podWith("dnsPolicy: Junk"), `spec.dnsPolicy: Unsupported value: "Junk": supported values: "ClusterFirstWithHostNet", ` +
			`"ClusterFirst", "Default", "None"`},
		kindstest.BadObject{podWith("dnsPolicy: None"), "spec.dnsConfig: Required value: must provide `dnsConfig` when `dnsPolicy` is None"},
		kindstest.BadObject{podWith("schedulingGates: [{name: a}, {name: a}]"), `spec.schedulingGates[1]: Duplicate value: "a"`},
		kindstest.BadObject{podWith("tolerations: [{key: a, operator: Lt, value: '1'}]"),
			`spec.tolerations[0].operator: Unsupported value: "Lt": supported values: "Equal", "Exists", "Lt", "Gt"`},
		kindstest.BadObject{podWith("topologySpreadConstraints: [{maxSkew: 1, topologyKey: a b, whenUnsatisfiable: DoNotSchedule}]"), ""},
		kindstest.BadObject{podWith("topologySpreadConstraints: [{maxSkew: 1, topologyKey: a, whenUnsatisfiable: ''}]"),
			`spec.topologySpreadConstraints[0].whenUnsatisfiable: Unsupported value: "": supported values: "DoNotSchedule", "ScheduleAnyway"`},
		kindstest.BadObject{podWith("topologySpreadConstraints: [{maxSkew: 1, topologyKey: a, whenUnsatisfiable: DoNotSchedule}, " +
			"{maxSkew: 2, topologyKey: a, whenUnsatisfiable: DoNotSchedule}]"),
			`spec.topologySpreadConstraints[0].{topologyKey, whenUnsatisfiable}: Duplicate value: "{a, DoNotSchedule}"`},
		kindstest.BadObject{podWith("securityContext: {fsGroupChangePolicy: '', seLinuxChangePolicy: Junk}"),
			`spec.securityContext.seLinuxChangePolicy: Unsupported value: "Junk": supported values: "MountOption", "Recursive"` + "\n" +
				`spec.securityContext.fsGroupChangePolicy: Unsupported value: "": supported values: "Always", "OnRootMismatch"`},
		kindstest.BadObject{podWith("securityContext: {seccompProfile: {}, appArmorProfile: {}}"),
			"spec.securityContext.appArmorProfile.type: Required value: type is required when appArmorProfile is set\n" +
				"spec.securityContext.seccompProfile.type: Required value: type is required when seccompProfile is set"},
		kindstest.BadObject{podContainer("restartPolicy: '', restartPolicyRules: [{action: '', exitCodes: {operator: ''}}]"),
			`spec.containers[0].restartPolicy: Unsupported value: "": supported values: "Always", "Never", "OnFailure"` + "\n" +
				`spec.containers[0].restartPolicyRules[0].action: Unsupported value: "": supported values: "Restart", "RestartAllContainers"` + "\n" +
				`spec.containers[0].restartPolicyRules[0].exitCodes.operator: Unsupported value: "": supported values: "In", "NotIn"`},
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
		kindstest.BadObject{fieldRef("metadata.labels['A']"), ""},
		kindstest.BadObject{fieldRef("spec.oops"), kindstest.InvalidText(env+".fieldPath", "spec.oops", "error converting fieldPath: field label not supported: spec.oops")},
		kindstest.BadObject{fieldRef("metadata.labels['a b']"), kindstest.InvalidText(env, "a b", qualified)},
		kindstest.BadObject{podContainer("envFrom: [{}]"), kindstest.InvalidText("spec.containers[0].envFrom", "", "must specify one of: `configMapRef` or `secretRef`")},
		kindstest.BadObject{podContainer("envFrom: [{secretRef: {}}]"), "spec.containers[0].envFrom[0].secretRef.name: Required value"},
		kindstest.BadObject{podContainer("volumeMounts: [{mountPath: /v}]"), "spec.containers[0].volumeMounts[0].name: Required value\n" +
			`spec.containers[0].volumeMounts[0].name: Not found: ""`},
		kindstest.BadObject{podContainer("livenessProbe: {httpGet: {port: 1, httpHeaders: [{name: a b}]}}"),
			kindstest.InvalidText("spec.containers[0].livenessProbe.httpGet.httpHeaders", "a b", validation.IsHTTPHeaderName("a b")[0])},
	)
}

// F38: huge pages come as whole pages, beside CPU or memory.
func TestHugePages(t *testing.T) {
	const r = "spec.containers[0].resources"
	limit := func(l string) string { return podContainer("resources: {limits: {" + l + "}}") }
	const multiple = " is not positive integer multiple of hugepages-2Mi"
	kindstest.CheckRefused[*corev1.Pod](t,
		kindstest.BadObject{limit("hugepages-2Mi: 4Mi, cpu: 1"), ""},
		kindstest.BadObject{limit("hugepages-2Mi: 4Mi"), r + ": Forbidden: HugePages require cpu or memory"},
		kindstest.BadObject{limit("hugepages-2Mi: 3Mi, memory: 1Gi"), kindstest.InvalidText(r+".limits[hugepages-2Mi]", "3Mi", "3Mi"+multiple) + "\n" +
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
		return kindstest.BadObject{user(name), kindstest.InvalidText(at+"runAsUserName", shown, "runAsUserName"+why)}
	}
	const all = "If pod contains any hostProcess containers then all containers must be HostProcess containers"
	kindstest.CheckRefused[*corev1.Pod](t,
		kindstest.BadObject{user(`NT AUTHORITY\SYSTEM`), ""},
		kindstest.BadObject{user(`example.com\a.b`), ""},
		wrong("", "", " cannot be an empty string"),
		wrong(`a\b\c`, `a\\b\\c`, " cannot contain more than one backslash"),
		wrong(`a:b\c`, `a:b\\c`, "'s Domain doesn't match the NetBios nor the DNS format"),
		wrong(`a\`, `a\\`, "'s User cannot be empty"),
		wrong("..", "..", "'s User cannot contain only periods or spaces"),
		wrong("a/b", "a/b", `'s User cannot contain the following characters: "/\:;|=,+*?<>@[]`),
		kindstest.BadObject{podWith("securityContext: {windowsOptions: {gmsaCredentialSpec: ''}}"),
			kindstest.InvalidText(at+"gmsaCredentialSpec", "", "gmsaCredentialSpec cannot be an empty string")},
		kindstest.BadObject{podWith("hostNetwork: true, securityContext: {windowsOptions: {hostProcess: true}}"), ""},
		kindstest.BadObject{podWith("securityContext: {windowsOptions: {hostProcess: true}}"),
			"spec.hostNetwork: Invalid value: false: hostNetwork must be true if pod contains any hostProcess containers"},
		kindstest.BadObject{"{metadata: {name: a}, spec: {hostNetwork: true, containers: [{name: c, image: i}, " +
			"{name: d, image: i, securityContext: {windowsOptions: {hostProcess: true}}}]}}", kindstest.InvalidText("spec", "", all)},
	)
}
