package kinds

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation"
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
	refuses[*corev1.Pod](t,
		bad{podWith("schedulerName: My_Scheduler"), ""},
		bad{podWith("runtimeClassName: ''"), invalidText("spec.runtimeClassName", "", notSubdomain)},
		bad{podWith("restartPolicy: Junk"), `spec.restartPolicy: Unsupported value: "Junk": supported values: "Always", "OnFailure", "Never"`},
		bad{podWith("dnsPolicy: Junk"), `spec.dnsPolicy: Unsupported value: "Junk": supported values: "ClusterFirstWithHostNet", ` +
			`"ClusterFirst", "Default", "None"`},
		bad{podWith("dnsPolicy: None"), "spec.dnsConfig: Required value: must provide `dnsConfig` when `dnsPolicy` is None"},
		bad{podWith("schedulingGates: [{name: a}, {name: a}]"), `spec.schedulingGates[1]: Duplicate value: "a"`},
		bad{podWith("tolerations: [{key: a, operator: Lt, value: '1'}]"),
			`spec.tolerations[0].operator: Unsupported value: "Lt": supported values: "Equal", "Exists", "Lt", "Gt"`},
		bad{podWith("topologySpreadConstraints: [{maxSkew: 1, topologyKey: a b, whenUnsatisfiable: DoNotSchedule}]"), ""},
		bad{podWith("topologySpreadConstraints: [{maxSkew: 1, topologyKey: a, whenUnsatisfiable: ''}]"),
			`spec.topologySpreadConstraints[0].whenUnsatisfiable: Unsupported value: "": supported values: "DoNotSchedule", "ScheduleAnyway"`},
		bad{podWith("topologySpreadConstraints: [{maxSkew: 1, topologyKey: a, whenUnsatisfiable: DoNotSchedule}, " +
			"{maxSkew: 2, topologyKey: a, whenUnsatisfiable: DoNotSchedule}]"),
			`spec.topologySpreadConstraints[0].{topologyKey, whenUnsatisfiable}: Duplicate value: "{a, DoNotSchedule}"`},
		bad{podWith("securityContext: {fsGroupChangePolicy: '', seLinuxChangePolicy: Junk}"),
			`spec.securityContext.seLinuxChangePolicy: Unsupported value: "Junk": supported values: "MountOption", "Recursive"` + "\n" +
				`spec.securityContext.fsGroupChangePolicy: Unsupported value: "": supported values: "Always", "OnRootMismatch"`},
		bad{podWith("securityContext: {seccompProfile: {}, appArmorProfile: {}}"),
			"spec.securityContext.appArmorProfile.type: Required value: type is required when appArmorProfile is set\n" +
				"spec.securityContext.seccompProfile.type: Required value: type is required when seccompProfile is set"},
		bad{podContainer("restartPolicy: '', restartPolicyRules: [{action: '', exitCodes: {operator: ''}}]"),
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
	refuses[*corev1.Pod](t,
		bad{fieldRef("metadata.labels['A']"), ""},
		bad{fieldRef("spec.oops"), invalidText(env+".fieldPath", "spec.oops", "error converting fieldPath: field label not supported: spec.oops")},
		bad{fieldRef("metadata.labels['a b']"), invalidText(env, "a b", qualified)},
		bad{podContainer("envFrom: [{}]"), invalidText("spec.containers[0].envFrom", "", "must specify one of: `configMapRef` or `secretRef`")},
		bad{podContainer("envFrom: [{secretRef: {}}]"), "spec.containers[0].envFrom[0].secretRef.name: Required value"},
		bad{podContainer("volumeMounts: [{mountPath: /v}]"), "spec.containers[0].volumeMounts[0].name: Required value\n" +
			`spec.containers[0].volumeMounts[0].name: Not found: ""`},
		bad{podContainer("livenessProbe: {httpGet: {port: 1, httpHeaders: [{name: a b}]}}"),
			invalidText("spec.containers[0].livenessProbe.httpGet.httpHeaders", "a b", validation.IsHTTPHeaderName("a b")[0])},
	)
}

// F38: huge pages come as whole pages, beside CPU or memory.
func TestHugePages(t *testing.T) {
	const r = "spec.containers[0].resources"
	limit := func(l string) string { return podContainer("resources: {limits: {" + l + "}}") }
	const multiple = " is not positive integer multiple of hugepages-2Mi"
	refuses[*corev1.Pod](t,
		bad{limit("hugepages-2Mi: 4Mi, cpu: 1"), ""},
		bad{limit("hugepages-2Mi: 4Mi"), r + ": Forbidden: HugePages require cpu or memory"},
		bad{limit("hugepages-2Mi: 3Mi, memory: 1Gi"), invalidText(r+".limits[hugepages-2Mi]", "3Mi", "3Mi"+multiple) + "\n" +
			invalidText(r+".requests[hugepages-2Mi]", "3Mi", "3Mi"+multiple)},
	)
}

// F38: the options for Windows are judged in every pod.
func TestWindowsOptions(t *testing.T) {
	const at = "spec.securityContext.windowsOptions."
	user := func(name string) string {
		return podWith("securityContext: {windowsOptions: {runAsUserName: '" + name + "'}}")
	}
	wrong := func(name, shown, why string) bad {
		return bad{user(name), invalidText(at+"runAsUserName", shown, "runAsUserName"+why)}
	}
	const all = "If pod contains any hostProcess containers then all containers must be HostProcess containers"
	refuses[*corev1.Pod](t,
		bad{user(`NT AUTHORITY\SYSTEM`), ""},
		bad{user(`example.com\a.b`), ""},
		wrong("", "", " cannot be an empty string"),
		wrong(`a\b\c`, `a\\b\\c`, " cannot contain more than one backslash"),
		wrong(`a:b\c`, `a:b\\c`, "'s Domain doesn't match the NetBios nor the DNS format"),
		wrong(`a\`, `a\\`, "'s User cannot be empty"),
		wrong("..", "..", "'s User cannot contain only periods or spaces"),
		wrong("a/b", "a/b", `'s User cannot contain the following characters: "/\:;|=,+*?<>@[]`),
		bad{podWith("securityContext: {windowsOptions: {gmsaCredentialSpec: ''}}"),
			invalidText(at+"gmsaCredentialSpec", "", "gmsaCredentialSpec cannot be an empty string")},
		bad{podWith("hostNetwork: true, securityContext: {windowsOptions: {hostProcess: true}}"), ""},
		bad{podWith("securityContext: {windowsOptions: {hostProcess: true}}"),
			"spec.hostNetwork: Invalid value: false: hostNetwork must be true if pod contains any hostProcess containers"},
		bad{"{metadata: {name: a}, spec: {hostNetwork: true, containers: [{name: c, image: i}, " +
			"{name: d, image: i, securityContext: {windowsOptions: {hostProcess: true}}}]}}", invalidText("spec", "", all)},
	)
}
