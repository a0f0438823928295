package kinds_test

import (
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/controlplane/api/kinds/kindstest"
)

// A value without a meaning is rejected, and so is a value that another field makes ineffective.
// Otherwise it would be stored and ignored. F38
func TestValuesWithoutMeaning(t *testing.T) {
	pod := func(spec string) string { return "{metadata: {name: a}, spec: {" + spec + "}}" }
	one := "containers: [{name: c, image: i}]"
	with := func(container string) string {
		return pod("os: {name: linux}, containers: [{name: c, image: i, " + container + "}]")
	}
	secure := func(context string) string { return pod("securityContext: {" + context + "}, " + one) }
	mount := func(m string, more string) string {
		return pod("volumes: [{name: v, emptyDir: {}}], containers: [{name: c, image: i, volumeMounts: [{name: v, " +
			"mountPath: /v, " + m + "}]" + more + "}]")
	}
	resource := func(ref string) string {
		return with("env: [{name: A, valueFrom: {resourceFieldRef: {" + ref + "}}}]")
	}
	const c0 = "spec.containers[0]."
	for _, c := range []struct{ text, want string }{
		{secure("fsGroupChangePolicy: Sometimes"),
			`spec.securityContext.fsGroupChangePolicy: Unsupported value: "Sometimes"`},
		{secure("fsGroupChangePolicy: OnRootMismatch"), ""},
		{secure("supplementalGroupsPolicy: Loose"),
			`spec.securityContext.supplementalGroupsPolicy: Unsupported value: "Loose"`},
		{secure("supplementalGroupsPolicy: Strict"), ""},
		{secure("appArmorProfile: {type: Custom}"),
			`spec.securityContext.appArmorProfile.type: Unsupported value: "Custom"`},
		{secure("appArmorProfile: {type: Localhost}"),
			"spec.securityContext.appArmorProfile.localhostProfile: Required value"},
		{with("securityContext: {appArmorProfile: {type: Unconfined, localhostProfile: p}}"),
			c0 + "securityContext.appArmorProfile.localhostProfile: Invalid value"},
		{with("securityContext: {procMount: Open}"), c0 + `securityContext.procMount: Unsupported value: "Open"`},
		{with("securityContext: {procMount: Default}"), ""},
		{pod("os: {name: plan9}, " + one), `spec.os: Unsupported value: "plan9"`},
		{pod("hostnameOverride: a_b, " + one), `spec.hostnameOverride: Invalid value: "a_b"`},
		{pod("hostnameOverride: " + strings.Repeat("a", 65) + ", " + one), "spec.hostnameOverride: Too long"},
		{pod("hostnameOverride: " + strings.Repeat("a", 64) + ", " + one), ""},
		{pod("hostnameOverride: a, hostNetwork: true, " + one),
			"spec.hostnameOverride: Forbidden: may not be specified when hostNetwork is true"},
		{pod("hostnameOverride: a, setHostnameAsFQDN: true, " + one),
			"spec.hostnameOverride: Forbidden: may not be specified when setHostnameAsFQDN is true"},
		{pod("volumes: [{name: v, emptyDir: {medium: Disk}}], " + one), ""},
		{mount("mountPropagation: Bidirectional", ""), c0 + "volumeMounts.mountPropagation: Forbidden"},
		{mount("mountPropagation: Bidirectional", ", securityContext: {privileged: true}"), ""},
		{mount("recursiveReadOnly: Always, readOnly: true", ""),
			c0 + `volumeMounts.recursiveReadOnly: Unsupported value: "Always"`},
		{mount("recursiveReadOnly: Enabled", ""),
			c0 + "volumeMounts.recursiveReadOnly: Forbidden: may only be specified when readOnly is true"},
		{mount("recursiveReadOnly: Enabled, readOnly: true, mountPropagation: HostToContainer", ""),
			c0 + "volumeMounts.recursiveReadOnly: Forbidden"},
		{mount("recursiveReadOnly: Enabled, readOnly: true", ""), ""},
		{with("ports: [{containerPort: 1, hostPort: 1, hostIP: here}]"), ""},
		{with("lifecycle: {stopSignal: SIGNONE}"), c0 + `lifecycle.stopSignal: Unsupported value: "SIGNONE"`},
		{with("lifecycle: {stopSignal: SIGRTMIN+3}"), ""},
		{pod("containers: [{name: c, image: i, lifecycle: {stopSignal: SIGUSR1}}]"),
			c0 + "lifecycle.stopSignal: Forbidden: may not be set for containers with empty `spec.os.name`"},
		{resource("resource: limits.disk"), c0 +
			`env[0].valueFrom.resourceFieldRef.resource: Unsupported value: "limits.disk"`},
		{resource("resource: memory"), c0 + `env[0].valueFrom.resourceFieldRef.resource: Unsupported value: "memory"`},
		{resource("resource: limits.memory, divisor: 7"),
			c0 + `env[0].valueFrom.resourceFieldRef.divisor: Invalid value: "limits.memory"`},
		{resource("resource: limits.memory, divisor: 1Mi"), ""},
		{resource("resource: requests.cpu, divisor: 1m"), ""},
		{with("livenessProbe: {grpc: {port: 1, mode: tls}}"), c0 + `livenessProbe.grpc.mode: Unsupported value: "tls"`},
		{with("env: [{name: A, valueFrom: {fieldRef: {apiVersion: v2, fieldPath: metadata.name}}}]"),
			c0 + `env[0].valueFrom.fieldRef.fieldPath: Invalid value: "metadata.name": error converting fieldPath: ` +
				`unsupported pod version: v2`},
		{with("restartPolicy: Sometimes"), c0 + `restartPolicy: Unsupported value: "Sometimes"`},
		{with("restartPolicy: Never"), ""},
		{with("restartPolicyRules: [{action: Restart, exitCodes: {operator: In, values: [42]}}]"),
			c0 + "restartPolicy: Required value"},
		{with("restartPolicy: Never, restartPolicyRules: [{action: Restart, exitCodes: {operator: In, values: [42]}}]"),
			""},
		{with("restartPolicy: Never, restartPolicyRules: [{action: Stop, exitCodes: {operator: In, values: [42]}}]"),
			c0 + `restartPolicyRules[0].action: Unsupported value: "Stop"`},
		{with("restartPolicy: Never, restartPolicyRules: [{action: Restart}]"),
			c0 + "restartPolicyRules[0].exitCodes: Required value"},
		{with("restartPolicy: Never, restartPolicyRules: [{action: Restart, exitCodes: {operator: Like, values: " +
			"[42]}}]"), c0 + `restartPolicyRules[0].exitCodes.operator: Unsupported value: "Like"`},
		{pod("initContainers: [{name: i, image: i, restartPolicy: OnFailure}], " + one), ""},
	} {
		var want []string
		if c.want != "" {
			want = []string{c.want}
		}
		kindstest.CheckErrors(t, c.text, kindstest.ValidationErrors[*corev1.Pod](t, c.text), want...)
	}
}
