package why

import (
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/controlplane/api"
)

// explainNamespace returns a Finding for a namespace that is being deleted, with the conditions and
// finalizers that delay the deletion. It returns nil for any other namespace.
func (w *World) explainNamespace(n *corev1.Namespace) []Finding {
	if n.DeletionTimestamp == nil {
		return nil
	}
	f := Finding{Object: objectName("namespace", n), What: "is being deleted", Since: timeOrNil(*n.DeletionTimestamp)}
	for _, c := range n.Status.Conditions {
		if c.Status == corev1.ConditionTrue {
			f.Details = append(f.Details, singleLine(c.Message))
		}
	}
	f.Details = boundList(f.Details)
	f.Because = "its content is being deleted"
	if len(f.Details) > 0 {
		f.Because = "something in it does not go:"
		f.Mend = []string{"kctl -n " + n.Name + " why KIND/NAME   # of what is named above"}
	}
	if len(n.Finalizers) > 0 {
		f.Details = append(f.Details, "finalizers hold the namespace itself: "+finalizerOwners(n.Finalizers))
		f.Mend = append(f.Mend, unfinalizeCommand(n, "namespace"))
	}
	return []Finding{f}
}

// explainNode returns the Findings about a node that is being deleted, is not Ready, has another
// condition that is True, is cordoned, or cannot be drained. It returns nil for any other node.
func (w *World) explainNode(n *corev1.Node) []Finding {
	if f := explainDeletion(n, "node"); f != nil {
		return []Finding{*f}
	}
	var out []Finding
	c := api.NodeCondition(n, corev1.NodeReady)
	switch {
	case c == nil:
		out = append(out, Finding{Object: objectName("node", n), What: "is not Ready",
			Since:   timeOrNil(n.CreationTimestamp),
			Because: "no agent has ever reported it",
			Mend:    []string{"kctl cluster token create --role node   # then let its agent join"}})
	case c.Status != corev1.ConditionTrue:
		f := Finding{Object: objectName("node", n), What: "is not Ready", Since: timeOrNil(c.LastTransitionTime),
			Because: singleLine(c.Reason + ": " + c.Message)}
		if c.Status == corev1.ConditionUnknown {
			f.Because = "its agent says nothing: " + singleLine(c.Message)
			f.Mend = []string{"kctl lab restart " + n.Name +
				"   # in a lab; elsewhere start keelson-agent again on that machine"}
		} else {
			f.Mend = []string{"kctl describe node " + n.Name}
		}
		if !c.LastHeartbeatTime.IsZero() {
			f.Details = append(f.Details, w.lastHeartbeat(c))
		}
		f.Details = append(f.Details, w.nodePodsText(n))
		out = append(out, f)
	}
	for _, c := range n.Status.Conditions {
		if c.Type == corev1.NodeReady || c.Status != corev1.ConditionTrue {
			continue
		}
		f := Finding{Object: objectName("node", n), What: "has condition " + string(c.Type),
			Since:   timeOrNil(c.LastTransitionTime),
			Because: singleLine(c.Message), Mend: []string{"kctl describe node " + n.Name}}
		w.explainPressure(n, c.Type, &f)
		out = append(out, f)
	}
	if n.Spec.Unschedulable {
		out = append(out, Finding{Object: objectName("node", n), What: "is cordoned: no new pod comes to it",
			Mend: []string{"kctl uncordon " + n.Name}})
		out = append(out, w.explainDrain(n)...)
	}
	return out
}

// exactHeartbeat is the longest usual time between a node's last heartbeat and the change of its
// condition Ready to Unknown. If the time is longer, the recorded heartbeat is not the last one: a
// replica received later heartbeats and failed before it recorded them.
const exactHeartbeat = 5 * time.Minute

// lastHeartbeat returns a text with the time since the last heartbeat of a node. ready is the
// node's condition Ready, which is not True. If the exact time was lost because a replica failed,
// the text contains a range.
func (w *World) lastHeartbeat(ready *corev1.NodeCondition) string {
	silent := ready.LastTransitionTime
	if ready.Status == corev1.ConditionUnknown && silent.Sub(ready.LastHeartbeatTime.Time) > exactHeartbeat {
		return fmt.Sprintf("last heartbeat between %s and %s ago: the replica that received it has failed",
			w.ageText(ready.LastHeartbeatTime), w.ageText(silent))
	}
	return "last heartbeat " + w.ageText(ready.LastHeartbeatTime) + " ago"
}

// explainPressure adds to f the effects of condition c, and the pods that node n has evicted. It
// sets f.Mend to a command that lists the usage of memory or disk space by pod. c must be
// MemoryPressure or DiskPressure; for other conditions it leaves f unchanged.
func (w *World) explainPressure(n *corev1.Node, c corev1.NodeConditionType, f *Finding) {
	switch c {
	case corev1.NodeMemoryPressure:
		f.Details = append(f.Details, "while it is short it evicts pods, those first that use more memory than they "+
			"requested; it takes no pods that requested nothing")
		f.Mend = []string{"kctl top pod -A --sort-by=memory   # who has it: let pods request what they use, or " +
			"give them limits"}
	case corev1.NodeDiskPressure:
		f.Details = append(f.Details, "while it is short it removes unused images and what ended containers have "+
			"left, then evicts pods; it takes no pods")
		f.Mend = []string{"kctl get --raw /api/v1/nodes/" + n.Name +
			"/proxy/stats/summary   # whose logs, layers and volumes take how much"}
	default:
		return
	}
	var evicted []string
	for i := range w.Placed {
		if p := &w.Placed[i]; p.Spec.NodeName == n.Name && p.Status.Phase == corev1.PodFailed &&
			p.Status.Reason == "Evicted" {
			evicted = append(evicted, p.Namespace+"/"+p.Name)
		}
	}
	if len(evicted) > 0 {
		f.Details = append(f.Details, "pods that it has evicted: "+strings.Join(boundList(evicted), ", "))
	}
}

// nodePodsText returns a text with the number of pods on node n that have not terminated. The text
// also contains how many of these pods are being evicted or deleted.
func (w *World) nodePodsText(n *corev1.Node) string {
	if !w.hasList(Placed) {
		return "its pods are not known"
	}
	all, going := 0, 0
	for _, p := range w.Placed {
		if p.Spec.NodeName != n.Name || api.IsPodTerminal(&p) {
			continue
		}
		all++
		if c := api.PodCondition(&p, corev1.DisruptionTarget); p.DeletionTimestamp != nil ||
			c != nil && c.Status == corev1.ConditionTrue {
			going++
		}
	}
	return fmt.Sprintf("%s on it, %d of them evicted and not ended", countNoun(all, "pod"), going)
}

// explainClaim returns the Findings about a PersistentVolumeClaim: that it is being deleted, has no
// volume, or has lost its volume. For a bound claim, they are about wrong volume attributes, a
// volume that is too small, and attach or mount errors. It returns nil for a bound claim without
// these problems.
func (w claimExplainer) explainClaim(c *corev1.PersistentVolumeClaim) []Finding {
	if f := explainDeletion(c, "persistentvolumeclaim"); f != nil {
		var users []string
		for _, p := range w.claimUsers(c) {
			users = append(users, p.Name)
		}
		if len(users) > 0 {
			f.Details = append(f.Details, "pods that use it: "+strings.Join(boundList(users), ", "))
			f.Mend = []string{kctlCommand(c, "delete pod %s   # when the data is not needed any more",
				strings.Join(users[:min(len(users), maxDetails)], " "))}
		}
		return []Finding{*f}
	}
	f := Finding{Object: objectName("persistentvolumeclaim", c), Since: timeOrNil(c.CreationTimestamp),
		Mend: []string{kctlCommand(c, "describe persistentvolumeclaim %s", c.Name)}}
	switch c.Status.Phase {
	case corev1.ClaimBound:
		return slices.Concat(w.explainAttributes(c), w.explainGrowth(c), w.explainBoundClaim(c))
	case corev1.ClaimLost:
		f.What, f.Because = "has lost its volume", "volume "+c.Spec.VolumeName+" is gone or is bound to another claim"
	default:
		f.What, f.Because = "has no volume", "nothing has been said of it yet"
	}
	e := w.claimEvent(c)
	if e == nil {
		return []Finding{f}
	}
	f.Because = singleLine(e.Message)
	f.Mend = claimMend(c, e, f.Mend)
	if e.Reason == "WaitForFirstConsumer" {
		w.explainConsumer(c, &f)
	}
	return []Finding{f}
}

// claimEvent returns the event that best explains why claim c has no volume, or nil. An unsupported
// data source comes first, then a volume populator, then provisioning errors.
func (w claimExplainer) claimEvent(c *corev1.PersistentVolumeClaim) *corev1.Event {
	if e := w.world.newestEvent(c.UID, "UnrecognizedDataSourceKind"); e != nil {
		return e // the other events are about the provisioner
	}
	asked := w.world.newestEvent(c.UID, "Provisioning")
	if asked != nil && strings.Contains(asked.Message, "populator") {
		return asked
	}
	e := w.world.newestEvent(c.UID, claimEvents...)
	if e == nil {
		return asked
	}
	// ExternalProvisioning is repeated even after the provisioner has reported an error.
	if failed := w.world.newestEvent(c.UID, "ProvisioningFailed"); e.Reason == "ExternalProvisioning" &&
		failed != nil && strings.HasPrefix(failed.Message, "failed to provision volume") &&
		w.world.Now.Sub(lastSeen(failed)) < maxEventAge {
		return failed
	}
	return e
}

// claimEvents lists the event reasons that explain why a claim has no volume.
var claimEvents = []string{"FailedBinding", "VolumeMismatch", "WaitForFirstConsumer", "ProvisioningFailed",
	"ExternalProvisioning", "ClaimLost", "ClaimMisbound"}

// claimMend returns commands that help claim c to get a volume, by the reason and the message of
// event e. It returns fallback if no specific command is known.
func claimMend(c *corev1.PersistentVolumeClaim, e *corev1.Event, fallback []string) []string {
	failed := e.Reason == "ProvisioningFailed"
	switch {
	case e.Reason == "WaitForFirstConsumer":
		return []string{kctlCommand(c, "get pods   # it gets its volume with the first pod that uses it")}
	case failed && strings.HasPrefix(e.Message, "storageclass") && strings.Contains(e.Message, "not found"):
		return []string{"kctl get storageclasses   # the class of a claim cannot be changed: create the class, " +
			"or recreate the claim"}
	case failed && (strings.Contains(e.Message, "VolumeAttributesClass") ||
		strings.Contains(e.Message, "volumeattributesclasses.storage.k8s.io")):
		return []string{"kctl get volumeattributesclasses   # make that class, or have the claim name one of these"}
	case failed && strings.Contains(e.Message, "a driver registers"):
		return []string{"kctl get csinodes -o yaml   # the drivers that have registered, by node",
			"kctl get pods -A   # does the driver run?"}
	case failed && strings.Contains(e.Message, "is on a disk that is read-only"):
		return []string{"kctl get csistoragecapacities -A   # the room of each node, where it has any",
			"kctl get nodes -o wide   # and see the kernel log of that node"}
	case failed && strings.Contains(e.Message, "mountOptions of the claim's StorageClass"):
		return []string{kctlCommand(c, "get persistentvolumeclaim %s -o jsonpath='{.spec.storageClassName}'   # its "+
			"class, whose mountOptions can be changed: kctl edit storageclass", c.Name)}
	case failed && strings.Contains(e.Message, "ResourceExhausted"):
		return []string{"kctl get csistoragecapacities -A   # the room of each node; delete claims that are not " +
			"needed, or add a disk"}
	case failed && strings.Contains(e.Message, "'kctl snapshot install'"):
		return []string{"kctl snapshot install"}
	case failed && strings.Contains(e.Message, "VolumeSnapshot ") && dataSourceName(c) != "":
		return []string{kctlCommand(c, "get volumesnapshots   # its dataSource is %s, and cannot be changed: create "+
			"that, or recreate the claim", dataSourceName(c))}
	case failed && strings.Contains(e.Message, "PersistentVolumeClaim ") && dataSourceName(c) != "":
		return []string{kctlCommand(c, "get persistentvolumeclaims   # its dataSource is %s, and cannot be changed: "+
			"create that, or recreate the claim", dataSourceName(c))}
	case e.Reason == "UnrecognizedDataSourceKind":
		return []string{"kctl get crds,volumepopulators",
			kctlCommand(c, "delete persistentvolumeclaim %s   # for an empty volume, recreate it without a "+
				"dataSourceRef", c.Name)}
	case e.Reason == "Provisioning" && strings.Contains(e.Message, "populator"):
		return []string{kctlCommand(c, "describe persistentvolumeclaim %s   # a populator tells of its work there",
			c.Name), "kctl get pods -A   # does the populator run?"}
	case e.Reason == "ExternalProvisioning":
		return []string{"kctl get csidrivers", "kctl get pods -A   # does the provisioner run?"}
	case e.Reason == "FailedBinding" || e.Reason == "VolumeMismatch":
		return []string{"kctl get persistentvolumes,storageclasses   # one has to fit"}
	}
	return fallback
}

// dataSourceName returns the name of the data source of claim c (spec.dataSource), or "".
func dataSourceName(c *corev1.PersistentVolumeClaim) string {
	if c.Spec.DataSource == nil {
		return ""
	}
	return c.Spec.DataSource.Name
}
