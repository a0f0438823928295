package why

import (
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"

	"keelson.dev/keelson/controlplane/api"
)

// claimUsers returns the pods that mount PersistentVolumeClaim c and have not terminated, sorted by
// name.
func (w claimExplainer) claimUsers(c *corev1.PersistentVolumeClaim) (users []*corev1.Pod) {
	for i := range w.world.Pods {
		p := &w.world.Pods[i]
		if p.Namespace == c.Namespace && !api.IsPodTerminal(p) &&
			slices.ContainsFunc(p.Spec.Volumes, func(v corev1.Volume) bool {
				return v.PersistentVolumeClaim != nil && v.PersistentVolumeClaim.ClaimName == c.Name ||
					v.Ephemeral != nil && p.Name+"-"+v.Name == c.Name
			}) {
			users = append(users, p)
		}
	}
	slices.SortFunc(users, func(a, b *corev1.Pod) int { return strings.Compare(a.Name, b.Name) })
	return users
}

// explainConsumer sets the reason in f, a Finding about claim c, which waits for its first
// consumer. The reason is why a pod that uses c is not scheduled. It does not change f if there is
// no such pod.
func (w claimExplainer) explainConsumer(c *corev1.PersistentVolumeClaim, f *Finding) {
	for _, p := range w.claimUsers(c) {
		for _, said := range p.Status.Conditions {
			if said.Type == corev1.PodScheduled && said.Status == corev1.ConditionFalse && said.Message != "" {
				f.Because = fmt.Sprintf("it is made on the node of the first pod that uses it, and pod %s has none: %s",
					p.Name, singleLine(said.Message))
				f.Mend = []string{kctlCommand(c, "why pod/%s", p.Name)}
				return
			}
		}
	}
}

// healthyClaimText returns the state of a bound claim without Findings: its volume and the nodes to
// which the volume is attached.
func (w claimExplainer) healthyClaimText(c *corev1.PersistentVolumeClaim) string {
	well := "bound to volume " + c.Spec.VolumeName
	for _, a := range w.volumeAttachments(c) {
		if a.Status.Attached {
			well += ", which node " + a.Spec.NodeName + " has"
		}
	}
	return well
}

// explainAttributes returns a Finding if the volume of claim c does not have the attributes of the
// requested VolumeAttributesClass. The reason comes from events and conditions of the claim. It
// returns nil otherwise.
func (w claimExplainer) explainAttributes(c *corev1.PersistentVolumeClaim) []Finding {
	has, want := "", ""
	if n := c.Status.CurrentVolumeAttributesClassName; n != nil {
		has = *n
	}
	if n := c.Spec.VolumeAttributesClassName; n != nil {
		want = *n
	}
	m := c.Status.ModifyVolumeStatus
	if m == nil && (want == has || want == "") {
		return nil
	}
	if m != nil && m.TargetVolumeAttributesClassName != "" {
		want = m.TargetVolumeAttributesClassName
	}
	f := Finding{Object: objectName("persistentvolumeclaim", c),
		What:    "its volume does not have the attributes of VolumeAttributesClass " + want,
		Since:   timeOrNil(c.CreationTimestamp),
		Because: "nothing has been said of it yet",
		Mend:    []string{kctlCommand(c, "describe persistentvolumeclaim %s", c.Name)}}
	if e := w.world.newestEvent(c.UID, "VolumeModifyFailed", "ExternalModifying"); e != nil {
		f.Because = singleLine(e.Message)
	}
	for _, said := range c.Status.Conditions {
		if said.Type == corev1.PersistentVolumeClaimVolumeModifyVolumeError && said.Status == corev1.ConditionTrue {
			f.Because, f.Since = singleLine(said.Message), timeOrNil(said.LastTransitionTime)
		}
	}
	switch {
	case m == nil:
		f.Mend = []string{"kctl get csidrivers", "kctl get pods -A   # does the driver's resizer run?"}
	case m.Status == corev1.PersistentVolumeClaimModifyVolumePending:
		f.Mend = []string{"kctl get volumeattributesclasses   # make that class, or have the claim name one of these"}
	case m.Status == corev1.PersistentVolumeClaimModifyVolumeInfeasible:
		back := "null"
		if has != "" {
			back = `"` + shellWord(has) + `"`
		}
		f.Mend = []string{"kctl get volumeattributesclasses",
			kctlCommand(c, "patch persistentvolumeclaim %s --type=merge -p", c.Name) +
				` '{"spec":{"volumeAttributesClassName":` + back + `}}'   # as it was, or another class`}
	}
	return []Finding{f}
}

// explainGrowth returns a Finding if claim c requests more storage than its volume has. The reason
// comes from events and conditions of the claim. It returns nil otherwise.
func (w claimExplainer) explainGrowth(c *corev1.PersistentVolumeClaim) []Finding {
	want, has := c.Spec.Resources.Requests[corev1.ResourceStorage], c.Status.Capacity[corev1.ResourceStorage]
	if has.IsZero() || want.Cmp(has) <= 0 {
		return nil
	}
	f := Finding{Object: objectName("persistentvolumeclaim", c),
		What:  fmt.Sprintf("its volume has %s, and %s are asked for", has.String(), want.String()),
		Since: timeOrNil(c.CreationTimestamp), Because: "nothing has been said of it yet",
		Mend: []string{kctlCommand(c, "describe persistentvolumeclaim %s", c.Name)}}
	e := w.world.newestEvent(c.UID, "VolumeResizeFailed", "ExternalExpanding")
	if e != nil {
		f.Because = singleLine(e.Message)
	}
	for _, said := range c.Status.Conditions {
		if said.Status != corev1.ConditionTrue {
			continue
		}
		switch said.Type {
		case corev1.PersistentVolumeClaimFileSystemResizePending:
			f.What, f.Since = "its volume has grown, and what its node has of it has not",
				timeOrNil(said.LastTransitionTime)
			f.Because = "that grows while a pod has it mounted, or when one mounts it"
		case corev1.PersistentVolumeClaimControllerResizeError, corev1.PersistentVolumeClaimNodeResizeError:
			f.Because, f.Since = singleLine(said.Message), timeOrNil(said.LastTransitionTime)
		}
	}
	switch {
	case strings.Contains(f.Because, "ResourceExhausted"):
		f.Mend = []string{"kctl get csistoragecapacities -A   # the room of each node; delete claims that are not " +
			"needed, or add a disk",
			kctlCommand(c, "patch persistentvolumeclaim %s --type=merge -p", c.Name) +
				` '{"spec":{"resources":{"requests":{"storage":"SIZE"}}}}'   # less, but more than ` + has.String()}
	case e != nil && e.Reason == "ExternalExpanding":
		f.Mend = []string{"kctl get csidrivers", "kctl get pods -A   # does the driver's resizer run?"}
	}
	return []Finding{f}
}

// volumeAttachments returns the VolumeAttachments of the volume of claim c, sorted by node name.
func (w claimExplainer) volumeAttachments(c *corev1.PersistentVolumeClaim) (of []*storagev1.VolumeAttachment) {
	for i := range w.world.Attachments {
		a := &w.world.Attachments[i]
		if from := a.Spec.Source.PersistentVolumeName; c.Spec.VolumeName != "" && from != nil &&
			*from == c.Spec.VolumeName {
			of = append(of, a)
		}
	}
	slices.SortFunc(of, func(a, b *storagev1.VolumeAttachment) int {
		return strings.Compare(a.Spec.NodeName, b.Spec.NodeName)
	})
	return of
}

// explainBoundClaim returns Findings about a bound claim with a volume that pods cannot use. First
// come attach and detach errors of the CSI driver. Then come pending pods with a failed attach or
// mount. It returns nil if there are no such errors.
func (w claimExplainer) explainBoundClaim(c *corev1.PersistentVolumeClaim) (out []Finding) {
	told := map[string]bool{} // nodes with a reported attach error
	for _, a := range w.volumeAttachments(c) {
		f := Finding{Object: objectName("persistentvolumeclaim", c),
			Mend: []string{"kctl describe volumeattachment " + shellWord(a.Name)}}
		switch s := a.Status; {
		case a.DeletionTimestamp != nil && s.DetachError != nil:
			f.What, f.Since, f.Because = "its volume cannot be taken from node "+a.Spec.NodeName,
				timeOrNil(*a.DeletionTimestamp), singleLine(s.DetachError.Message)
		case a.DeletionTimestamp == nil && !s.Attached && s.AttachError != nil:
			f.What, f.Since, f.Because = "its volume cannot be attached to node "+a.Spec.NodeName,
				timeOrNil(a.CreationTimestamp), singleLine(s.AttachError.Message)
			told[a.Spec.NodeName] = true
		default:
			continue
		}
		if strings.Contains(f.Because, "CSI driver") &&
			(strings.Contains(f.Because, "registers") || strings.Contains(f.Because, "is ready and has")) {
			f.Mend = []string{"kctl get csinodes -o yaml   # the drivers that have registered, by node",
				"kctl get pods -A   # does the driver run?"}
		}
		out = append(out, f)
	}
	for _, p := range w.claimUsers(c) {
		if p.Status.Phase != corev1.PodPending || p.Spec.NodeName == "" || told[p.Spec.NodeName] ||
			len(out) >= maxDetails {
			continue
		}
		e := w.attachFailure(p, c.Spec.VolumeName)
		if e == nil {
			e = w.world.newestEvent(p.UID, "FailedMount")
		}
		if got := w.world.newestEvent(p.UID, "SuccessfulAttachVolume"); e == nil ||
			e.Reason == "FailedMount" && got != nil && lastSeen(e).Before(lastSeen(got)) {
			continue
		}
		f := Finding{Object: objectName("persistentvolumeclaim", c),
			What:  fmt.Sprintf("pod %s on node %s does not get its volume", p.Name, p.Spec.NodeName),
			Since: timeOrNil(p.CreationTimestamp), Because: singleLine(e.Message),
			Mend: []string{kctlCommand(c, "why pod/%s", p.Name)}}
		if strings.HasPrefix(e.Message, "Multi-Attach error") {
			f.Mend = w.detachCommands(c, p)
		}
		out = append(out, f)
	}
	return out
}

// attachFailure returns the newest event FailedAttachVolume of pod p for a volume, or nil. An event
// that a later SuccessfulAttachVolume follows does not count. If volume is empty, it considers all
// volumes. It ignores events that the node reported, because they only report that the node waits
// for the attachment.
func (w claimExplainer) attachFailure(p *corev1.Pod, volume string) (worst *corev1.Event) {
	about := func(e *corev1.Event) string {
		_, rest, _ := strings.Cut(e.Message, `volume "`)
		of, _, _ := strings.Cut(rest, `"`)
		return of
	}
	for i := range w.world.Events {
		e := &w.world.Events[i]
		if e.InvolvedObject.UID != p.UID || e.Reason != "FailedAttachVolume" || volume != "" && about(e) != volume ||
			worst != nil && lastSeen(e).Before(lastSeen(worst)) {
			continue
		}
		if !slices.ContainsFunc(w.world.Events, func(o corev1.Event) bool {
			return o.InvolvedObject.UID == p.UID && o.Reason == "SuccessfulAttachVolume" && about(&o) == about(e) &&
				!lastSeen(&o).Before(lastSeen(e))
		}) {
			worst = e
		}
	}
	return worst
}

// detachCommands returns commands that detach the volume of claim c from other nodes, so that it
// can be attached to the node of pod p.
func (w claimExplainer) detachCommands(c *corev1.PersistentVolumeClaim, p *corev1.Pod) (mend []string) {
	for _, a := range w.volumeAttachments(c) {
		if a.Spec.NodeName == p.Spec.NodeName {
			continue
		}
		if n := w.world.nodeNamed(a.Spec.NodeName); n != nil && !api.IsNodeReady(n) {
			mend = append(mend, "kctl why node/"+shellWord(n.Name),
				fmt.Sprintf("kctl taint node %s %s=nodeshutdown:NoExecute   # only when that machine is off for "+
					"certain: then at once", shellWord(n.Name), corev1.TaintNodeOutOfService))
			continue
		}
		for _, o := range w.claimUsers(c) {
			if o.Spec.NodeName == a.Spec.NodeName {
				mend = append(mend,
					kctlCommand(c, "delete pod %s   # so that node %s gives the volume up, where two pods were not "+
						"meant", o.Name, a.Spec.NodeName))
			}
		}
	}
	return append(boundList(mend), "kctl get volumeattachments   # who has which volume")
}
