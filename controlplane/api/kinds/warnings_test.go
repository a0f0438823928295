package kinds_test

import (
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	nodev1 "k8s.io/api/node/v1"
	resourcev1 "k8s.io/api/resource/v1"
	storagev1 "k8s.io/api/storage/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/kinds"
	"keelson.dev/keelson/controlplane/api/kinds/kindstest"
)

// warned is an object and the warnings about it when it is new, one per line. A want that starts
// with "…" is the end of the only warning.
type warned struct{ text, want string }

func warns[P api.Object](t *testing.T, cases ...warned) {
	t.Helper()
	for _, c := range cases {
		o := kindstest.Load[P](t, c.text)
		got := strings.Join(kinds.ObjectWarnings(o, nil), "\n")
		if end, cut := strings.CutPrefix(c.want, "…"); cut && strings.HasSuffix(got, end) &&
			!strings.Contains(got, "\n") {
			continue
		}
		if got != c.want {
			t.Errorf("%s\n got  %s\n want %s", c.text, got, c.want)
		}
	}
}

// The warnings about pods are those of Kubernetes. F38
func TestPodWarnings(t *testing.T) {
	pod := func(spec string) string {
		return "{metadata: {name: a}, spec: {containers: [{name: c, image: i}], " + spec + "}}"
	}
	one := func(container string) string {
		return "{metadata: {name: a}, spec: {containers: [{name: c, image: i, " + container + "}]}}"
	}
	const c0 = "spec.containers[0]."
	warns[*corev1.Pod](t,
		warned{pod("restartPolicy: Never"), ""},
		warned{"{metadata: {name: a.b}, spec: {containers: [{name: c, image: i}]}}",
			"metadata.name: this is used in the Pod's hostname, which can result in surprising behavior; a DNS label " +
				"is recommended: [must not contain dots]"},
		warned{pod("nodeSelector: {beta.kubernetes.io/os: linux}"),
			`spec.nodeSelector[beta.kubernetes.io/os]: deprecated since v1.14; use "kubernetes.io/os" instead`},
		warned{pod("affinity: {nodeAffinity: {preferredDuringSchedulingIgnoredDuringExecution: [{weight: 1, " +
			"preference: {matchExpressions: [{key: a, operator: In, values: ['-']}]}}]}}"),
			"…" + notLabelValue},
		warned{pod("topologySpreadConstraints: [{maxSkew: 1, topologyKey: failure-domain.beta.kubernetes.io/zone, " +
			"whenUnsatisfiable: DoNotSchedule}]"),
			"spec.topologySpreadConstraints[0].topologyKey: failure-domain.beta.kubernetes.io/zone is deprecated " +
				"since v1.17; use \"topology.kubernetes.io/zone\" instead\n" +
				"spec.topologySpreadConstraints[0].labelSelector: a null labelSelector results in matching no pod"},
		warned{pod("affinity: {podAntiAffinity: {preferredDuringSchedulingIgnoredDuringExecution: [{weight: 1, " +
			"podAffinityTerm: {topologyKey: a}}]}}"),
			"spec.affinity.podAntiAffinity.preferredDuringSchedulingIgnoredDuringExecution[0]" +
				".podAffinityTerm.labelSelector: a null labelSelector results in matching no pod"},
		warned{pod("hostAliases: [{ip: 10.0.0.1}, {ip: 10.0.0.1}]"), `spec.hostAliases[1].ip: duplicate ip "10.0.0.1"`},
		warned{pod("imagePullSecrets: [{name: a}, {name: a}, {}]"),
			"spec.imagePullSecrets[1].name: duplicate name \"a\"\nspec.imagePullSecrets[2].name: invalid " +
				"empty name \"\""},
		warned{one("resources: {limits: {memory: 100m}, requests: {memory: 0}}"),
			c0 + "resources.limits[memory]: fractional byte value \"100m\" is invalid, must be an integer"},
		warned{one("env: [{name: A, value: a}, {name: A, value: b}]"),
			c0 + `env[1]: hides previous definition of "A", which may be dropped when using apply`},
		warned{one("env: [{name: A, value: a}, {name: A, value: $(A):b}]"), ""},
		warned{one("ports: [{containerPort: 80}, {containerPort: 80, hostPort: 81}]"),
			c0 + "ports[1]: overlapping port definition with " + c0 + "ports[0]"},
		warned{one("ports: [{containerPort: 80}, {containerPort: 80}]"),
			c0 + "ports[1]: duplicate port definition with " + c0 + "ports[0]"},
		warned{one("ports: [{containerPort: 80, hostPort: 80}, {containerPort: 80, hostPort: 80, hostIP: 127.0.0.1}]"),
			c0 + "ports[1]: dangerously ambiguous port definition with " + c0 + "ports[0]"},
		warned{one("ports: [{containerPort: 80, hostIP: 127.0.0.1}]"),
			c0 + "ports[0]: hostIP set without hostPort: {Name: HostPort:0 ContainerPort:80 Protocol:TCP " +
				"HostIP:127.0.0.1}"},
		warned{"{metadata: {name: a}, spec: {containers: [{name: c, image: i, ports: [{name: p, " +
			"containerPort: 80}]}, " +
			"{name: d, image: i, ports: [{name: p, containerPort: 81}]}]}}",
			"spec.containers[1].ports[0]: duplicate port name \"p\" with spec.containers[0].ports[0], services and " +
				"probes that select ports by name will use spec.containers[0].ports[0]"},
		warned{pod("volumes: [{name: v, configMap: {name: m, items: [{key: a, path: p}, {key: b, path: p/q}]}}]"),
			`volume "v" (ConfigMap "m"): overlapping paths: "p/q" with "p"`},
		warned{pod("volumes: [{name: v, projected: {sources: [{secret: {name: s, items: [{key: a, path: p}]}}, " +
			"{serviceAccountToken: {path: p}}, {}]}}]"),
			"volume \"v\" (Projected) has no sources provided\nvolume \"v\" (Projected): overlapping paths: \"p\" " +
				"(ServiceAccountToken) with \"p\" (Secret \"s\")"},
		warned{pod("dnsPolicy: None, dnsConfig: {nameservers: ['2001:db8:0::1']}"),
			`…IPv6 address "2001:db8:0::1" should be in RFC 5952 canonical format ("2001:db8::1")`},
		warned{"{metadata: {name: a, annotations: {seccomp.security.alpha.kubernetes.io/pod: x, " +
			"scheduler.alpha.kubernetes.io/critical-pod: ''}}, spec: {containers: [{name: c, image: i}]}}",
			"metadata.annotations[scheduler.alpha.kubernetes.io/critical-pod]: non-functional in v1.16+; use the " +
				"\"priorityClassName\" field instead\n" +
				"metadata.annotations[seccomp.security.alpha.kubernetes.io/pod]: non-functional in v1.27+; use the " +
				"\"seccompProfile\" field instead"},
	)
	p := kindstest.Load[*corev1.Pod](t, pod("imagePullSecrets: [{}]"))
	if got := kinds.ObjectWarnings(p, p); len(got) > 0 {
		t.Errorf("an update of a pod warns %q", got)
	}
}

const notLabelValue = "preference.matchExpressions[0].values[0]: - is invalid, a valid label must be an empty " +
	"string or consist of " +

	"alphanumeric characters, '-', '_' or '.', and must start and end with an alphanumeric character " +
	"(e.g. 'MyValue', " +
	" or 'my_value',  " +
	"or '12345', regex used for validation is '(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?')"

// The warnings about the other kinds are those of Kubernetes. F38
func TestObjectWarnings(t *testing.T) {
	const hosts = "metadata.name: this is used in Pod names and hostnames, which can result in " +
		"surprising behavior; a " +
		"DNS label is recommended: [must not contain dots]"
	const template = "template: {metadata: {labels: {a: b}}, spec: {imagePullSecrets: [{}], restartPolicy: Never, " +
		"containers: [{name: c, image: i}]}}"
	const secret = `.spec.imagePullSecrets[0].name: invalid empty name ""`
	of := func(spec string) string { return "{metadata: {name: a.b}, spec: {" + spec + "}}" }
	warns[*appsv1.Deployment](t, warned{of("selector: {}, " + template), hosts + "\nspec.template" + secret})
	warns[*appsv1.DaemonSet](t, warned{of("selector: {}, " + template), "spec.template" + secret})
	warns[*batchv1.Job](t, warned{of(template), hosts + "\nspec.template" + secret},
		warned{"{metadata: {name: a}, spec: {completionMode: Indexed, completions: 200000, parallelism: 20000}}",
			"spec: In Indexed Jobs with a number of completions higher than 10^5 and a parallelism higher than 10^4, " +
				"Kubernetes might not be able to track completedIndexes when a big number of indexes fail"})
	warns[*batchv1.CronJob](t, warned{of("schedule: '* * * * *', jobTemplate: {spec: {" + template + "}}"),
		hosts + "\nspec.jobTemplate.spec.template" + secret})
	warns[*corev1.ReplicationController](t, warned{of(template), hosts + "\nspec.template" + secret})
	warns[*corev1.PodTemplate](t, warned{"{metadata: {name: a}, " + template + "}", "template" + secret})
	warns[*appsv1.StatefulSet](t,
		warned{of("revisionHistoryLimit: -1, " + template +
			", volumeClaimTemplates: [{metadata: {name: v}, spec: {resources: {limits: {storage: 1m}}}}]"),
			"spec.template" + secret + "\nspec.volumeClaimTemplates[0].resources.limits[storage]: " +
				"fractional byte value " +
				"\"1m\" is invalid, must be an integer\n" +
				"spec.revisionHistoryLimit: a negative value retains all historical revisions; a value >= " +
				"0 is recommended"})
	warns[*corev1.Service](t,
		warned{"{metadata: {annotations: {service.kubernetes.io/topology-aware-hints: auto}}}",
			"annotation service.kubernetes.io/topology-aware-hints is deprecated, please use " +
				"service.kubernetes.io/topology-mode instead"},
		warned{"{spec: {clusterIP: None, sessionAffinity: ClientIP, loadBalancerIP: 1.2.3.4}}",
			"spec.loadBalancerIP is ignored for headless services\nspec.SessionAffinity is ignored for " +
				"headless services"},
		warned{"{spec: {externalName: a.b}}", `spec.externalName is ignored when spec.type is not "ExternalName"`},
		warned{"{spec: {type: ExternalName, externalName: a, externalIPs: [1.2.3.4]}}",
			`spec.externalIPs is ignored when spec.type is "ExternalName"`},
		warned{"{spec: {trafficDistribution: PreferClose}}",
			`spec.trafficDistribution: "PreferClose" is deprecated; use "PreferSameZone"`})
	warns[*discoveryv1.EndpointSlice](t, warned{"{addressType: FQDN, endpoints: [{addresses: [a.b]}]}",
		"spec.addressType: FQDN endpoints are deprecated"},
		warned{"{addressType: IPv6, endpoints: [{addresses: ['2001:db8:0::1']}]}",
			`…IPv6 address "2001:db8:0::1" should be in RFC 5952 canonical format ("2001:db8::1")`})
	warns[*corev1.Endpoints](t, warned{"{subsets: [{notReadyAddresses: [{ip: '2001:db8:0::1'}]}]}",
		`…IPv6 address "2001:db8:0::1" should be in RFC 5952 canonical format ("2001:db8::1")`})
	warns[*networkingv1.NetworkPolicy](t,
		warned{"{spec: {podSelector: {}, egress: [{to: [{ipBlock: {cidr: 10.0.0.1/8}}]}]}}",
			`…CIDR value "10.0.0.1/8" is ambiguous in this context (should be "10.0.0.0/8" or "10.0.0.1/32"?)`})
	warns[*networkingv1.Ingress](t, warned{"{metadata: {annotations: {kubernetes.io/ingress.class: a}}}",
		`annotation "kubernetes.io/ingress.class" is deprecated, please use 'spec.ingressClassName' instead`})
	const label = `deprecated since v1.14; use "kubernetes.io/os" instead`
	warns[*corev1.PersistentVolume](t,
		warned{"{metadata: {annotations: {volume.beta.kubernetes.io/mount-options: ro, " +
			"volume.beta.kubernetes.io/storage-class: a}}, spec: " +
			"{nodeAffinity: {required: {nodeSelectorTerms: [{matchExpressions: [{key: beta.kubernetes.io/os, " +
			"operator: Exists}]}]}}}}",
			"metadata.annotations[volume.beta.kubernetes.io/storage-class]: deprecated since v1.8; use " +
				"\"storageClassName\" attribute instead\n" +
				"metadata.annotations[volume.beta.kubernetes.io/mount-options]: deprecated since v1.31; use " +
				"\"mountOptions\" attribute instead\n" +
				"spec.nodeAffinity.required.nodeSelectorTerms[0].matchExpressions[0].key: beta.kubernetes.io/os is " +
				label})
	warns[*corev1.PersistentVolumeClaim](t, warned{"{spec: {resources: {limits: {storage: 1m}}}}",
		"spec.resources.limits[storage]: fractional byte value \"1m\" is invalid, must be an integer"})
	warns[*storagev1.StorageClass](t,
		warned{"{allowedTopologies: [{matchLabelExpressions: [{key: beta.kubernetes.io/os}]}]}",
			"allowedTopologies[0].matchLabelExpressions[0].key: " + label})
	warns[*storagev1.CSIStorageCapacity](t, warned{"{nodeTopology: {matchLabels: {beta.kubernetes.io/os: a}}}",
		"nodeTopology.matchLabels.beta.kubernetes.io/os: " + label})
	warns[*storagev1.CSIDriver](t, warned{"{spec: {tokenRequests: [{}]}}",
		"spec.serviceAccountTokenInSecrets is unset; if supported by this CSI driver, set to true to " +
			"prevent possible " +
			"logging of tokens in volume attributes"},
		warned{"{spec: {tokenRequests: [{}], serviceAccountTokenInSecrets: false}}", ""})
	warns[*corev1.Node](t, warned{"{spec: {externalID: a}}",
		"spec.externalID: this field is deprecated, and is unused by Kubernetes"})
	warns[*corev1.ResourceQuota](t, warned{"{spec: {hard: {memory: 2Gi, limits.memory: 1Gi}}}",
		"ResourceQuota memory (2Gi) should be less than limits.memory (1Gi)"})
	warns[*corev1.Secret](t, warned{"{type: kubernetes.io/tls, data: {tls.crt: '', tls.key: ''}}",
		"tls: failed to find any PEM data in certificate input"})
	warns[*nodev1.RuntimeClass](t, warned{"{scheduling: {nodeSelector: {beta.kubernetes.io/os: a}}}",
		"scheduling.nodeSelector: " + label})
	warns[*resourcev1.ResourceSlice](t, warned{"{spec: {driver: A.io}}",
		`spec.driver: driver names should be lowercase; "A.io" contains uppercase characters`})
	d := kindstest.Load[*appsv1.Deployment](t, of("selector: {}, "+template))
	if got := kinds.ObjectWarnings(d, d); len(got) > 0 {
		t.Errorf("an update that leaves the specification warns %q", got)
	}
}
