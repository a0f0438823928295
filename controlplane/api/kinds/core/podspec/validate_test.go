package podspec_test

import (
	"testing"

	corev1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/controlplane/api/kinds/kindstest"
)

func podValidationPod(spec string) string { return "{metadata: {name: a}, spec: {" + spec + "}}" }

func podValidationWith(container string) string {
	return podValidationPod("containers: [{name: c, image: i, " + container + "}]")
}

// podValidationCases are the cases of TestPodValidation.
var podValidationCases = []struct {
	name, text string
	want       []string
}{
	{"good", podValidationWith("ports: [{containerPort: 80, name: http}]"), nil},
	{"no containers", podValidationPod("restartPolicy: Always"), []string{"spec.containers: Required value"}},
	{"no image", podValidationPod("containers: [{name: c}]"), []string{"spec.containers[0].image: Required value"}},
	{"no name", podValidationPod("containers: [{image: i}]"), []string{"spec.containers[0].name: Required value"}},
	{"bad pod name", "{metadata: {name: A_b}, spec: {containers: [{name: c, image: i}]}}",
		[]string{`metadata.name: Invalid value: "A_b": a lowercase RFC 1123 subdomain`}},
	{"bad label", "{metadata: {name: a, labels: {a b: c}}, spec: {containers: [{name: c, image: i}]}}",
		[]string{"metadata.labels: Invalid value: \"a b\""}},
	{"bad name", podValidationPod("containers: [{name: C_1, image: i}]"),
		[]string{`spec.containers[0].name: Invalid value: "C_1": a lowercase RFC 1123 label`}},
	{"same name", podValidationPod("initContainers: [{name: c, image: i}], containers: [{name: c, image: i}]"),
		[]string{`spec.initContainers[0].name: Duplicate value: "c"`}},
	{"restart policy", podValidationPod("restartPolicy: Sometimes, containers: [{name: c, image: i}]"),
		[]string{`spec.restartPolicy: Unsupported value: "Sometimes": supported values: "Always", ` +
			`"OnFailure", "Never"`}},
	{"pull policy", podValidationWith("imagePullPolicy: Now"),
		[]string{`spec.containers[0].imagePullPolicy: Unsupported value: "Now"`}},
	{"port range", podValidationWith("ports: [{containerPort: 70000}]"),
		[]string{"spec.containers[0].ports[0].containerPort: Invalid value: 70000: must be between 1 and " +
			"65535, inclusive"}},
	{"no port", podValidationWith("ports: [{name: a}]"),
		[]string{"spec.containers[0].ports[0].containerPort: Required value"}},
	{"port names", podValidationWith("ports: [{containerPort: 1, name: a}, {containerPort: 2, name: a}]"),
		[]string{`spec.containers[0].ports[1].name: Duplicate value: "a"`}},
	{"host ports", podValidationWith("ports: [{containerPort: 1, hostPort: 80}, {containerPort: 2, hostPort: 80}]"),
		[]string{"spec.containers[0].ports[1].hostPort: Duplicate value"}},
	{"same port, other protocol",
		podValidationWith("ports: [{containerPort: 1, hostPort: 80}, {containerPort: 1, hostPort: 80, protocol: UDP}]"),
		nil},
	{"host network",
		podValidationPod("hostNetwork: true, containers: [{name: c, image: i, ports: [{containerPort: 1, " +
			"hostPort: 2}]}]"),
		[]string{"spec.containers[0].ports[0].hostPort: Invalid value: 2: must match `containerPort` when " +
			"`hostNetwork` is true"}},
	{"protocol", podValidationWith("ports: [{containerPort: 1, protocol: tcp}]"),
		[]string{`spec.containers[0].ports[0].protocol: Unsupported value: "tcp"`}},
	{"env name", podValidationWith("env: [{name: a=b, value: c}]"),
		[]string{`spec.containers[0].env[0].name: Invalid value: "a=b"`}},
	{"env twice over",
		podValidationWith("env: [{name: A, value: c, valueFrom: {fieldRef: {fieldPath: status.podIP}}}]"),
		[]string{"spec.containers[0].env[0].valueFrom: Invalid value: \"\": may not be specified when " +
			"`value` is not empty"}},
	{"env field", podValidationWith("env: [{name: A, valueFrom: {fieldRef: {fieldPath: spec.oops}}}]"),
		[]string{`spec.containers[0].env[0].valueFrom.fieldRef.fieldPath: Invalid value: "spec.oops": error ` +
			`converting fieldPath: field label not supported: spec.oops`}},
	{"env label", podValidationWith("env: [{name: A, valueFrom: {fieldRef: {fieldPath: \"metadata.labels['app']\"}}}]"),
		nil},
	{"env key", podValidationWith("env: [{name: A, valueFrom: {configMapKeyRef: {name: c}}}]"),
		[]string{"spec.containers[0].env[0].valueFrom.configMapKeyRef.key: Required value"}},
	{"requests over limits", podValidationWith("resources: {limits: {cpu: 100m}, requests: {cpu: 200m}}"),
		[]string{`spec.containers[0].resources.requests: Invalid value: "200m": must be less than or equal to ` +
			`cpu limit of 100m`}},
	{"negative", podValidationWith("resources: {limits: {cpu: -1}}"),
		[]string{`spec.containers[0].resources.limits[cpu]: Invalid value: "-1": must be greater than or equal ` +
			`to 0`, `spec.containers[0].resources.requests[cpu]: Invalid value: "-1"`}},
	{"unknown resource", podValidationWith("resources: {limits: {cpus: 1}}"), []string{
		`spec.containers[0].resources.limits[cpus]: Invalid value: "cpus": must be a standard resource type ` +
			`or fully qualified`,
		`spec.containers[0].resources.limits[cpus]: Invalid value: "cpus": must be a standard ` +
			`resource for containers`,
		"spec.containers[0].resources.requests[cpus]", "spec.containers[0].resources.requests[cpus]"}},
	{"a gpu", podValidationWith("resources: {limits: {nvidia.com/gpu: 2}}"), nil},
	{"half a gpu", podValidationWith("resources: {limits: {nvidia.com/gpu: 500m}}"),
		[]string{`spec.containers[0].resources.limits[nvidia.com/gpu]: Invalid value: "500m": must be an integer`,
			"spec.containers[0].resources.requests[nvidia.com/gpu]"}},
	{"gpus requested", podValidationWith("resources: {requests: {nvidia.com/gpu: 1}}"),
		[]string{"spec.containers[0].resources.limits: Required value: Limit must be set for non " +
			"overcommitable resources"}},
	{"no such volume", podValidationWith("volumeMounts: [{name: v, mountPath: /v}]"),
		[]string{`spec.containers[0].volumeMounts[0].name: Not found: "v"`}},
	{"same mount path",
		podValidationPod("volumes: [{name: v}], containers: [{name: c, image: i, volumeMounts: [{name: v, " +
			"mountPath: /v}, {name: v, mountPath: /v}]}]"),
		[]string{`spec.containers[0].volumeMounts[1].mountPath: Invalid value: "/v": must be unique`}},
	{"sub path",
		podValidationPod("volumes: [{name: v}], containers: [{name: c, image: i, volumeMounts: [{name: v, " +
			"mountPath: /v, subPath: a/../../b}]}]"),
		[]string{`spec.containers[0].volumeMounts.subPath: Invalid value: "a/../../b": must not contain '..'`}},
	{"two sources",
		podValidationPod("volumes: [{name: v, emptyDir: {}, hostPath: {path: /a}}], containers: [{name: c, image: i}]"),
		[]string{"spec.volumes[0].hostPath: Forbidden: may not specify more than 1 volume type"}},
	{"same volume", podValidationPod("volumes: [{name: v}, {name: v}], containers: [{name: c, image: i}]"),
		[]string{`spec.volumes[1].name: Duplicate value: "v"`}},
	{"volume of nothing", podValidationPod("volumes: [{name: v, configMap: {}}], containers: [{name: c, image: i}]"),
		[]string{"spec.volumes[0].configMap.name: Required value"}},
	{"file mode",
		podValidationPod("volumes: [{name: v, secret: {secretName: s, defaultMode: 512}}], containers: " +
			"[{name: c, image: i}]"),
		[]string{"spec.volumes[0].secret.defaultMode: Invalid value: 512: must be a number between 0 and 0777"}},
	{"short token",
		podValidationPod("serviceAccountName: s, volumes: [{name: v, projected: {sources: " +
			"[{serviceAccountToken: {path: t, expirationSeconds: 60}}]}}], containers: [{name: c, image: i}]"),
		[]string{"spec.volumes[0].projected.sources[0].serviceAccountToken.expirationSeconds: Invalid value: 60: " +
			"may not specify a duration less than 10 minutes"}},
	{"probe of nothing", podValidationWith("livenessProbe: {}"),
		[]string{"spec.containers[0].livenessProbe: Required value: must specify a handler type"}},
	{"probe of two", podValidationWith("livenessProbe: {exec: {command: [a]}, tcpSocket: {port: 1}}"),
		[]string{"spec.containers[0].livenessProbe.tcpSocket: Forbidden: may not specify more than " +
			"1 handler type"}},
	{"probe port", podValidationWith("readinessProbe: {httpGet: {port: 0}}"),
		[]string{"spec.containers[0].readinessProbe.httpGet.port: Invalid value: 0: must be between 1 and " +
			"65535, inclusive"}},
	{"probe threshold", podValidationWith("livenessProbe: {successThreshold: 2, tcpSocket: {port: 1}}"),
		[]string{"spec.containers[0].livenessProbe.successThreshold: Invalid value: 2: must be 1"}},
	{"readiness threshold", podValidationWith("readinessProbe: {successThreshold: 2, tcpSocket: {port: 1}}"), nil},
	{"probe time", podValidationWith("startupProbe: {periodSeconds: -1, tcpSocket: {port: 1}}"),
		[]string{"spec.containers[0].startupProbe.periodSeconds: Invalid value: -1"}},
	{"hook of nothing", podValidationWith("lifecycle: {preStop: {}}"),
		[]string{"spec.containers[0].lifecycle.preStop: Required value: must specify a handler type"}},
	{"init probe",
		podValidationPod("initContainers: [{name: i, image: i, readinessProbe: {tcpSocket: {port: 1}}}], " +
			"containers: [{name: c, image: i}]"),
		[]string{"spec.initContainers[0].readinessProbe: Forbidden: may not be set for init containers without " +
			"restartPolicy=Always"}},
	{"sidecar probe",
		podValidationPod("initContainers: [{name: i, image: i, restartPolicy: Always, readinessProbe: " +
			"{tcpSocket: {port: 1}}}], containers: [{name: c, image: i}]"), nil},
	{"toleration", podValidationPod("tolerations: [{operator: Equal, value: a}], containers: [{name: c, image: i}]"),
		[]string{`spec.tolerations[0].operator: Invalid value: "Equal": operator must be Exists when`}},
	{"toleration seconds",
		podValidationPod("tolerations: [{key: a, operator: Exists, effect: NoSchedule, tolerationSeconds: " +
			"3}], containers: [{name: c, image: i}]"),
		[]string{`spec.tolerations[0].effect: Invalid value: "NoSchedule": effect must be 'NoExecute'`}},
	{"affinity operator",
		podValidationPod("affinity: {nodeAffinity: {requiredDuringSchedulingIgnoredDuringExecution: " +
			"{nodeSelectorTerms: " +
			"[{matchExpressions: [{key: a, operator: Like}]}]}}}, containers: [{name: c, image: i}]"),
		[]string{
			"spec.affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution.nodeSelectorTerms[0].matchExpressions[0]" +
				".operator: Invalid value: \"Like\": not a valid selector operator"}},
	{"affinity values",
		podValidationPod("affinity: {nodeAffinity: {requiredDuringSchedulingIgnoredDuringExecution: " +
			"{nodeSelectorTerms: [{matchExpressions: [{key: a, operator: In}]}]}}}, containers: [{name: c, image: i}]"),
		[]string{
			"spec.affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution.nodeSelectorTerms[0].matchExpressions[0]" +
				".values: Required value: must be specified when `operator` is 'In' or 'NotIn'"}},
	{"affinity weight",
		podValidationPod("affinity: {podAntiAffinity: {preferredDuringSchedulingIgnoredDuringExecution: " +
			"[{weight: 101, podAffinityTerm: {topologyKey: a}}]}}, containers: [{name: c, image: i}]"),
		[]string{"spec.affinity.podAntiAffinity.preferredDuringSchedulingIgnoredDuringExecution[0].weight: " +
			"Invalid value: 101: must be in the range 1-100"}},
	{"topology key",
		podValidationPod("affinity: {podAffinity: {requiredDuringSchedulingIgnoredDuringExecution: " +
			"[{labelSelector: {}}]}}, containers: [{name: c, image: i}]"), []string{
			"spec.affinity.podAffinity.requiredDuringSchedulingIgnoredDuringExecution[0].topologyKey: Required " +
				"value",
			`spec.affinity.podAffinity.requiredDuringSchedulingIgnoredDuringExecution[0].topologyKey: ` +
				`Invalid value: ` +
				`"": name part must be non-empty`,
			`spec.affinity.podAffinity.requiredDuringSchedulingIgnoredDuringExecution[0].topologyKey: ` +
				`Invalid value: ` +
				`"": name part must consist of`}},
	{"label keys without selector",
		podValidationPod("affinity: {podAffinity: {requiredDuringSchedulingIgnoredDuringExecution: [{topologyKey: a, " +
			"matchLabelKeys: [x]}]}}, containers: [{name: c, image: i}]"),
		[]string{"spec.affinity.podAffinity.requiredDuringSchedulingIgnoredDuringExecution[0].matchLabelKeys: " +
			"Forbidden: must not be specified when labelSelector is not set"}},
	{"label keys both ways",
		podValidationPod("affinity: {podAntiAffinity: {requiredDuringSchedulingIgnoredDuringExecution: " +
			"[{topologyKey: a, labelSelector: {}, matchLabelKeys: [x], mismatchLabelKeys: [x]}]}}, containers: " +
			"[{name: c, image: i}]"),
		[]string{
			`spec.affinity.podAntiAffinity.requiredDuringSchedulingIgnoredDuringExecution[0].matchLabelKeys[0]: ` +
				`Invalid value: "x": exists in both matchLabelKeys and mismatchLabelKeys`}},
	{"label key selected twice",
		podValidationPod("topologySpreadConstraints: [{maxSkew: 1, topologyKey: a, whenUnsatisfiable: DoNotSchedule, " +
			"matchLabelKeys: [x], labelSelector: {matchLabels: {x: a}, matchExpressions: [{key: x, operator: " +
			"Exists}]}}], containers: [{name: c, image: i}]"),
		[]string{`spec.topologySpreadConstraints[0][0]: Invalid value: "x": exists in both matchLabelKeys ` +
			`and labelSelector`}},
	{"spread",
		podValidationPod("topologySpreadConstraints: [{maxSkew: 0, topologyKey: a, whenUnsatisfiable: Sometimes, " +
			"nodeTaintsPolicy: Perhaps, labelSelector: {}}], containers: [{name: c, image: i}]"),
		[]string{"spec.topologySpreadConstraints[0].maxSkew: Invalid value: 0: must be greater than zero",
			`spec.topologySpreadConstraints[0].whenUnsatisfiable: Unsupported value: "Sometimes": supported ` +
				`values: "DoNotSchedule", "ScheduleAnyway"`,
			`spec.topologySpreadConstraints[0].nodeTaintsPolicy: Unsupported value: "Perhaps": supported values: ` +
				`"Honor", "Ignore"`}},
	{"spread twice",
		podValidationPod("topologySpreadConstraints: [{maxSkew: 1, topologyKey: a, whenUnsatisfiable: " +
			"ScheduleAnyway, " +
			"minDomains: 2}, {maxSkew: 2, topologyKey: a, whenUnsatisfiable: ScheduleAnyway}], containers: " +
			"[{name: c, image: i}]"),
		[]string{"spec.topologySpreadConstraints[0].minDomains: Invalid value: 2: can only use minDomains if " +
			"whenUnsatisfiable=DoNotSchedule, not ScheduleAnyway",
			`spec.topologySpreadConstraints[0].{topologyKey, whenUnsatisfiable}: Duplicate value: "{a, ` +
				`ScheduleAnyway}"`}},
	{"node selector", podValidationPod("nodeSelector: {a b: c}, containers: [{name: c, image: i}]"),
		[]string{"spec.nodeSelector: Invalid value: \"a b\""}},
	{"grace", podValidationPod("terminationGracePeriodSeconds: -1, containers: [{name: c, image: i}]"), nil},
	{"dns", podValidationPod("dnsPolicy: None, containers: [{name: c, image: i}]"),
		[]string{"spec.dnsConfig: Required value: must provide `dnsConfig` when `dnsPolicy` is None"}},
	{"seccomp", podValidationWith("securityContext: {seccompProfile: {type: Localhost}}"),
		[]string{"spec.containers[0].securityContext.seccompProfile.localhostProfile: Required value"}},
}

// F38: a pod that is wrong is refused, and the field is named.
func TestPodValidation(t *testing.T) {
	for _, c := range podValidationCases {
		t.Run(c.name, func(t *testing.T) {
			kindstest.CheckErrors(t, c.name, kindstest.ValidationErrors[*corev1.Pod](t, c.text), c.want...)
		})
	}
}
