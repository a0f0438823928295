package kinds_test

import (
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	policyv1 "k8s.io/api/policy/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	schedulingv1 "k8s.io/api/scheduling/v1"
	storagev1 "k8s.io/api/storage/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/kinds"
	"keelson.dev/keelson/controlplane/api/kinds/kindstest"
)

// F18: the columns of every kind, as kubectl users know them.
func TestRows(t *testing.T) {
	checkRows(t, []printedRow{
		{kindstest.PrintTable[*corev1.Namespace](t, "{metadata: {name: a}}"), "NAME|STATUS|AGE\na|Active|3h"},
		{kindstest.PrintTable[*corev1.Node](t, `
metadata: {name: w1, labels: {node-role.kubernetes.io/worker: "", kubernetes.io/role: edge}}
spec: {unschedulable: true}
status:
  conditions: [{type: Ready, status: "True"}]
  addresses: [{type: InternalIP, address: 10.0.0.2}]
  nodeInfo: {kubeletVersion: v0.1.0, osImage: Debian, kernelVersion: "6.1", containerRuntimeVersion: "keelson://0.1"}
`), "NAME|STATUS|ROLES|AGE|VERSION|+INTERNAL-IP|+EXTERNAL-IP|+OS-IMAGE|+KERNEL-VERSION|+CONTAINER-RUNTIME\n" +
			"w1|Ready,SchedulingDisabled|edge,worker|3h|v0.1.0|+10.0.0.2|+<none>|+Debian|+6.1|+keelson://0.1"},
		{kindstest.PrintTable[*corev1.Node](t,
			"{metadata: {name: w1}, status: {conditions: [{type: Ready, status: Unknown}]}}"),
			"NAME|STATUS|ROLES|AGE|VERSION|+INTERNAL-IP|+EXTERNAL-IP|+OS-IMAGE|+KERNEL-VERSION|+CONTAINER-RUNTIME\n" +
				"w1|NotReady|<none>|3h||+<none>|+<none>|+<unknown>|+<unknown>|+<unknown>"},
		{kindstest.PrintTable[*corev1.Pod](t, kindstest.PodText),
			"NAME|READY|STATUS|RESTARTS|AGE|+IP|+NODE|+NOMINATED NODE|+READINESS " +
				"GATES\nweb|0/1|Pending|0|3h|+<none>|+<none>|+<none>|+<none>"},
		{kindstest.PrintTable[*corev1.Service](t,
			"{metadata: {name: a}, spec: {type: NodePort, clusterIP: 10.96.0.9, selector: {app: a}, ports: [{port: "+
				"80, nodePort: 30080}, {port: 53, protocol: UDP}]}}"),
			"NAME|TYPE|CLUSTER-IP|EXTERNAL-IP|PORT(S)|AGE|+SELECTOR\na|NodePort|10.96.0.9|<none>|80:30080/TCP," +
				"53/UDP|3h|+app=a"},
		{kindstest.PrintTable[*corev1.Service](t,
			"{metadata: {name: a}, spec: {type: LoadBalancer, ports: [{port: 80}]}}"),
			"NAME|TYPE|CLUSTER-IP|EXTERNAL-IP|PORT(S)|AGE|+SELECTOR\na|LoadBalancer|<none>|<pending>|80/TCP|3h|+<none>"},
		{kindstest.PrintTable[*corev1.Service](t,
			"{metadata: {name: a}, spec: {type: ExternalName, externalName: example.com}}"),
			"NAME|TYPE|CLUSTER-IP|EXTERNAL-IP|PORT(S)|AGE|+SELECTOR\na|ExternalName|<none>|example.com|<none>|3h|+<none>"},
		{kindstest.PrintTable[*corev1.Endpoints](t,
			"{metadata: {name: a}, subsets: [{addresses: [{ip: 1.1.1.1}, {ip: 1.1.1.2}, {ip: 1.1.1.3}, {ip: "+
				"1.1.1.4}], ports: [{port: 80}]}]}"),
			"NAME|ENDPOINTS|AGE\na|1.1.1.1:80,1.1.1.2:80,1.1.1.3:80 + 1 more...|3h"},
		{kindstest.PrintTable[*discoveryv1.EndpointSlice](t,
			"{metadata: {name: a}, addressType: IPv4, ports: [{port: 80}], endpoints: [{addresses: [1.1.1.1]}]}"),
			"NAME|ADDRESSTYPE|PORTS|ENDPOINTS|AGE\na|IPv4|80|1.1.1.1|3h"},
		{kindstest.PrintTable[*discoveryv1.EndpointSlice](t, "{metadata: {name: a}, addressType: IPv4}"),
			"NAME|ADDRESSTYPE|PORTS|ENDPOINTS|AGE\na|IPv4|<unset>|<unset>|3h"},
		{kindstest.PrintTable[*corev1.ConfigMap](t, "{metadata: {name: a}, data: {a: b, c: d}}"),
			"NAME|DATA|AGE\na|2|3h"},
		{kindstest.PrintTable[*corev1.Secret](t, "{metadata: {name: a}, stringData: {a: b}}"),
			"NAME|TYPE|DATA|AGE\na|Opaque|1|3h"},
		{kindstest.PrintTable[*corev1.ServiceAccount](t, "{metadata: {name: a}}"), "NAME|SECRETS|AGE\na|0|3h"},
		{kindstest.PrintTable[*corev1.Event](t,
			`{metadata: {name: e}, type: Warning, reason: BackOff, count: 4, firstTimestamp: "2026-03-01T11:00:00Z", lastTimestamp: "2026-03-01T11:59:00Z",
 message: "again ", involvedObject: {kind: Pod, name: p, fieldPath: "spec.containers{c}"}, source: {component: agent, host: w1}}`),
			"LAST SEEN|TYPE|REASON|OBJECT|+SUBOBJECT|+SOURCE|MESSAGE|+FIRST " +
				"SEEN|+COUNT|+NAME\n60s|Warning|BackOff|pod/p|+spec.containers{c}|+agent, w1|again|+60m|+4|+e"},
	})
}

// F18: the columns of leases, storage, workloads, and policies.
func TestRowsOfOtherGroups(t *testing.T) {
	checkRows(t, []printedRow{
		{kindstest.PrintTable[*corev1.Event](t, `{metadata: {name: e}, type: Normal, reason: R, eventTime: `+
			`"2026-03-01T11:59:30.000000Z", reportingComponent: sched, involvedObject: {kind: Pod, name: p}}`),
			"LAST SEEN|TYPE|REASON|OBJECT|+SUBOBJECT|+SOURCE|MESSAGE|+FIRST " +
				"SEEN|+COUNT|+NAME\n30s|Normal|R|pod/p|+|+sched||+30s|+1|+e"},
		{kindstest.PrintTable[*coordinationv1.Lease](t, "{metadata: {name: a}, spec: {holderIdentity: w1}}"),
			"NAME|HOLDER|AGE\na|w1|3h"},
		{kindstest.PrintTable[*corev1.PersistentVolume](t,
			"{metadata: {name: a}, spec: {capacity: {storage: 1Gi}, accessModes: [ReadWriteMany, ReadWriteOnce], "+
				"storageClassName: s, claimRef: {namespace: ns, name: c}, hostPath: {path: /a}}, status: "+
				"{phase: Bound}}"),
			"NAME|CAPACITY|ACCESS MODES|RECLAIM " +
				"POLICY|STATUS|CLAIM|STORAGECLASS|VOLUMEATTRIBUTESCLASS|REASON|AGE|+VOLUMEMODE\na|1Gi|RWO," +
				"RWX|Retain|Bound|ns/c|s|<unset>||3h|+Filesystem"},
		{kindstest.PrintTable[*corev1.PersistentVolumeClaim](t,
			"{metadata: {name: a}, spec: {storageClassName: s, volumeName: v}, status: {phase: Bound, capacity: "+
				"{storage: 2Gi}, accessModes: [ReadWriteOnce]}}"),
			"NAME|STATUS|VOLUME|CAPACITY|ACCESS " +
				"MODES|STORAGECLASS|VOLUMEATTRIBUTESCLASS|AGE|+VOLUMEMODE\na|Bound|v|2Gi|RWO|s|<unset>|3h|+Filesystem"},
		{kindstest.PrintTable[*storagev1.StorageClass](t,
			"{metadata: {name: a, annotations: {storageclass.kubernetes.io/is-default-class: 'true'}}, "+
				"provisioner: p}"),
			"NAME|PROVISIONER|RECLAIMPOLICY|VOLUMEBINDINGMODE|ALLOWVOLUMEEXPANSION|AGE\na " +
				"(default)|p|Delete|Immediate|false|3h"},
		{kindstest.PrintTable[*storagev1.CSIDriver](t, "{metadata: {name: a}, spec: {attachRequired: false}}"),
			"NAME|ATTACHREQUIRED|PODINFOONMOUNT|STORAGECAPACITY|TOKENREQUESTS|REQUIRESREPUBLISH|MODES|AGE\na|false|false|false|<unset>|false|Persistent|3h"},
		{kindstest.PrintTable[*storagev1.CSINode](t, "{metadata: {name: a}, spec: {drivers: [{name: d, nodeID: n}]}}"),
			"NAME|DRIVERS|AGE\na|1|3h"},
		{kindstest.PrintTable[*storagev1.VolumeAttachment](t,
			"{metadata: {name: a}, spec: {attacher: d, nodeName: w1, source: {persistentVolumeName: v}}}"),
			"NAME|ATTACHER|PV|NODE|ATTACHED|AGE\na|d|v|w1|false|3h"},
		{kindstest.PrintTable[*appsv1.Deployment](t,
			"{metadata: {name: a}, spec: {replicas: 3, selector: {matchLabels: {app: a}}, template: {spec: "+
				"{containers: [{name: c, image: i}, {name: d, image: j}]}}}, status: {readyReplicas: 2, "+
				"updatedReplicas: 3, availableReplicas: 1}}"),
			"NAME|READY|UP-TO-DATE|AVAILABLE|AGE|+CONTAINERS|+IMAGES|+SELECTOR\na|2/3|3|1|3h|+c,d|+i,j|+app=a"},
		{kindstest.PrintTable[*appsv1.ReplicaSet](t,
			"{metadata: {name: a}, spec: {replicas: 3, selector: {matchLabels: {app: a}}, template: {spec: "+
				"{containers: [{name: c, image: i}]}}}, status: {replicas: 2, readyReplicas: 1}}"),
			"NAME|DESIRED|CURRENT|READY|AGE|+CONTAINERS|+IMAGES|+SELECTOR\na|3|2|1|3h|+c|+i|+app=a"},
		{kindstest.PrintTable[*schedulingv1.PriorityClass](t, "{metadata: {name: a}, value: 7}"),
			"NAME|VALUE|GLOBAL-DEFAULT|AGE|PREEMPTIONPOLICY\na|7|false|3h|PreemptLowerPriority"},
		{kindstest.PrintTable[*policyv1.PodDisruptionBudget](t,
			"{metadata: {name: a}, spec: {minAvailable: 50%}, status: {disruptionsAllowed: 1}}"),
			"NAME|MIN AVAILABLE|MAX UNAVAILABLE|ALLOWED DISRUPTIONS|AGE\na|50%|N/A|1|3h"},
		{kindstest.PrintTable[*rbacv1.ClusterRole](t, "{metadata: {name: a}}"),
			"NAME|CREATED AT\na|2026-03-01T09:00:00Z"},
		{kindstest.PrintTable[*rbacv1.RoleBinding](t,
			"{metadata: {name: a}, roleRef: {kind: Role, name: r}, subjects: [{kind: User, name: u}, {kind: Group, "+
				"name: g}, {kind: ServiceAccount, name: s, namespace: ns}]}"),
			"NAME|ROLE|AGE|+USERS|+GROUPS|+SERVICEACCOUNTS\na|Role/r|3h|+u|+g|+ns/s"},
	})
}

// printedRow is a printed table, with lines separated by newlines and cells by "|".
type printedRow struct{ got, want string }

func checkRows(t *testing.T, rows []printedRow) {
	t.Helper()
	for _, c := range rows {
		if c.got != c.want {
			t.Errorf("\n got %s\nwant %s", c.got, c.want)
		}
	}
}

func TestFieldSelectors(t *testing.T) {
	set := func(o api.Object, name string) string { return kinds.All().ByType(o).Lists.Fields(o)[name] }
	pod := kindstest.Load[*corev1.Pod](t, "{metadata: {name: a}, spec: {nodeName: w1, serviceAccountName: s, "+
		"hostNetwork: true, containers: [{name: c, image: i}]}, status: {podIP: 1.2.3.4}}")
	for name, want := range map[string]string{"spec.nodeName": "w1", "status.phase": "Pending",
		"status.podIP": "1.2.3.4", "status.podIPs": "", "spec.restartPolicy": "Always",
		"spec.schedulerName": "default-scheduler", "spec.serviceAccountName": "s", "spec.hostNetwork": "true"} {
		if got := set(pod, name); got != want {
			t.Errorf("%s: %q, want %q", name, got, want)
		}
	}
	event := kindstest.Load[*corev1.Event](t,
		"{metadata: {name: e}, reason: R, type: Normal, reportingComponent: x, involvedObject: {kind: Pod, "+
			"name: p, uid: u}}")
	for name, want := range map[string]string{"involvedObject.kind": "Pod", "involvedObject.name": "p",
		"involvedObject.uid": "u", "reason": "R", "type": "Normal", "source": "x"} {
		if got := set(event, name); got != want {
			t.Errorf("%s: %q, want %q", name, got, want)
		}
	}
	if got := set(&corev1.Node{}, "spec.unschedulable"); got != "false" {
		t.Error(got)
	}
}
