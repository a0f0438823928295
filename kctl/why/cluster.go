package why

import (
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
)

// namespace explains a namespace that does not go.
func (w *World) namespace(n *corev1.Namespace) []Finding {
	if n.DeletionTimestamp == nil {
		return nil
	}
	f := Finding{Object: name("namespace", n), What: "is being deleted", Since: at(*n.DeletionTimestamp)}
	for _, c := range n.Status.Conditions {
		if c.Status == corev1.ConditionTrue {
			f.Details = append(f.Details, line(c.Message))
		}
	}
	f.Details = bounded(f.Details)
	f.Because = "its content is being deleted"
	if len(f.Details) > 0 {
		f.Because = "something in it does not go:"
		f.Mend = []string{"kctl -n " + n.Name + " why KIND/NAME   # of what is named above"}
	}
	if len(n.Finalizers) > 0 {
		f.Details = append(f.Details, "finalizers hold the namespace itself: "+owned(n.Finalizers))
		f.Mend = append(f.Mend, unfinalize(n, "namespace"))
	}
	return []Finding{f}
}

// nodeOf explains a node that takes no pods, or short of something.
func (w *World) nodeOf(n *corev1.Node) []Finding {
	if f := deletedObject(n, "node"); f != nil {
		return []Finding{*f}
	}
	var out []Finding
	c := nodeCondition(n, corev1.NodeReady)
	switch {
	case c == nil:
		out = append(out, Finding{Object: name("node", n), What: "is not Ready", Since: at(n.CreationTimestamp),
			Because: "no agent has ever told of it", Mend: []string{"kctl cluster token create --role node   # then let its agent join"}})
	case c.Status != corev1.ConditionTrue:
		f := Finding{Object: name("node", n), What: "is not Ready", Since: at(c.LastTransitionTime), Because: line(c.Reason + ": " + c.Message)}
		if c.Status == corev1.ConditionUnknown {
			f.Because = "its agent says nothing: " + line(c.Message)
			f.Mend = []string{"kctl lab restart " + n.Name + "   # in a lab; elsewhere start keelson-agent again on that machine"}
		} else {
			f.Mend = []string{"kctl describe node " + n.Name}
		}
		if !c.LastHeartbeatTime.IsZero() {
			f.Details = append(f.Details, "last heard of "+w.age(c.LastHeartbeatTime)+" ago")
		}
		f.Details = append(f.Details, w.onNode(n))
		out = append(out, f)
	}
	for _, c := range n.Status.Conditions {
		if c.Type == corev1.NodeReady || c.Status != corev1.ConditionTrue {
			continue
		}
		out = append(out, Finding{Object: name("node", n), What: "has condition " + string(c.Type), Since: at(c.LastTransitionTime),
			Because: line(c.Message), Mend: []string{"kctl describe node " + n.Name}})
	}
	if n.Spec.Unschedulable {
		out = append(out, Finding{Object: name("node", n), What: "is cordoned: no new pod comes to it", Mend: []string{"kctl uncordon " + n.Name}})
	}
	return out
}

// onNode counts the pods of a node, and those that have been told to go.
func (w *World) onNode(n *corev1.Node) string {
	if !w.read(Placed) {
		return "its pods are not known"
	}
	all, going := 0, 0
	for _, p := range w.Placed {
		if p.Spec.NodeName != n.Name || p.Status.Phase == corev1.PodSucceeded || p.Status.Phase == corev1.PodFailed {
			continue
		}
		all++
		if c := podCondition(&p, corev1.DisruptionTarget); p.DeletionTimestamp != nil || c != nil && c.Status == corev1.ConditionTrue {
			going++
		}
	}
	return fmt.Sprintf("%s on it, %d of them evicted and not ended", many(all, "pod"), going)
}

// claim explains a PersistentVolumeClaim that has no volume, or does not go.
func (w *World) claim(c *corev1.PersistentVolumeClaim) []Finding {
	if f := deletedObject(c, "persistentvolumeclaim"); f != nil {
		var users []string
		for _, p := range w.Pods {
			if p.Namespace == c.Namespace && slices.ContainsFunc(p.Spec.Volumes, func(v corev1.Volume) bool {
				return v.PersistentVolumeClaim != nil && v.PersistentVolumeClaim.ClaimName == c.Name
			}) {
				users = append(users, p.Name)
			}
		}
		if len(users) > 0 {
			slices.Sort(users)
			f.Details = append(f.Details, "pods that use it: "+strings.Join(bounded(users), ", "))
			f.Mend = []string{kctl(c, "delete pod %s   # when the data is not needed any more", strings.Join(users[:min(len(users), most)], " "))}
		}
		return []Finding{*f}
	}
	f := Finding{Object: name("persistentvolumeclaim", c), Since: at(c.CreationTimestamp), Mend: []string{kctl(c, "describe persistentvolumeclaim %s", c.Name)}}
	switch c.Status.Phase {
	case corev1.ClaimBound:
		return nil
	case corev1.ClaimLost:
		f.What, f.Because = "has lost its volume", "volume "+c.Spec.VolumeName+" is gone or is bound to another claim"
	default:
		f.What, f.Because = "has no volume", "nothing has been said of it yet"
	}
	e := w.event(c.UID, "FailedBinding", "VolumeMismatch", "WaitForFirstConsumer", "ProvisioningFailed", "ExternalProvisioning", "ClaimLost", "ClaimMisbound")
	if e == nil {
		return []Finding{f}
	}
	f.Because = line(e.Message)
	switch {
	case e.Reason == "WaitForFirstConsumer":
		f.Mend = []string{kctl(c, "get pods   # it gets its volume with the first pod that uses it")}
	case e.Reason == "ProvisioningFailed" && strings.HasPrefix(e.Message, "storageclass") && strings.Contains(e.Message, "not found"):
		f.Mend = []string{"kctl get storageclasses   # the class of a claim cannot be changed: make the class, or the claim anew"}
	case e.Reason == "ProvisioningFailed" && strings.Contains(e.Message, "a driver registers"):
		f.Mend = []string{"kctl get csinodes -o yaml   # the drivers that have registered, by node", "kctl get pods -A   # does the driver run?"}
	case e.Reason == "ProvisioningFailed" && strings.Contains(e.Message, "ResourceExhausted"):
		f.Mend = []string{"kctl get csistoragecapacities -A   # the room of each node; delete claims that are not needed, or add a disk"}
	case e.Reason == "ExternalProvisioning":
		f.Mend = []string{"kctl get csidrivers", "kctl get pods -A   # does the provisioner run?"}
	case e.Reason == "FailedBinding" || e.Reason == "VolumeMismatch":
		f.Mend = []string{"kctl get persistentvolumes,storageclasses   # one has to fit"}
	}
	return []Finding{f}
}
