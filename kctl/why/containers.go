package why

import (
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
)

func allStatuses(p *corev1.Pod) []corev1.ContainerStatus {
	return slices.Concat(p.Status.InitContainerStatuses, p.Status.ContainerStatuses)
}

// explainContainers returns a Finding for each container of pod p that waits because of an error,
// or that has terminated with a nonzero exit code. Init containers are included.
func (w *World) explainContainers(p *corev1.Pod) []Finding {
	var out []Finding
	for _, s := range allStatuses(p) {
		f := Finding{Object: objectName("pod", p)}
		containerText := "container " + s.Name
		if slices.ContainsFunc(p.Spec.InitContainers, func(c corev1.Container) bool { return c.Name == s.Name }) {
			containerText = "init container " + s.Name
		}
		switch {
		case s.State.Waiting != nil:
			if !w.explainWaiting(p, &s, containerText, &f) {
				continue
			}
		case s.State.Terminated != nil && s.State.Terminated.ExitCode != 0:
			f.What = containerText + " has ended"
			f.Because, f.Since = w.exitText(p, s.Name, s.State.Terminated), timeOrNil(s.State.Terminated.FinishedAt)
			f.Mend = []string{kctlCommand(p, "logs %s -c %s", p.Name, s.Name)}
		default:
			continue
		}
		out = append(out, f)
		if len(out) == maxDetails {
			break
		}
	}
	return out
}

// explainEphemeral returns a Finding for each ephemeral container of pod p that waits because of an
// error. The exit code of an ephemeral container is no error.
func (w *World) explainEphemeral(p *corev1.Pod) []Finding {
	var out []Finding
	for i := range p.Status.EphemeralContainerStatuses {
		s := &p.Status.EphemeralContainerStatuses[i]
		f := Finding{Object: objectName("pod", p)}
		if s.State.Waiting == nil || !w.explainWaiting(p, s, "ephemeral container "+s.Name, &f) {
			continue
		}
		f.Since = nil // its status has no time
		f.Details = append(f.Details, "the pod's other containers are not affected")
		f.Mend = []string{kctlCommand(p, "debug %s --image=IMAGE   # it cannot be changed: add another one", p.Name)}
		if s.State.Waiting.Reason == "CreateContainerConfigError" {
			f.Mend = missingObjectCommands(p, s.State.Waiting.Message)
		}
		out = append(out, f)
		if len(out) == maxDetails {
			break
		}
	}
	return out
}

// explainWaiting fills Finding f with the reason why a container is in state waiting, and returns
// true. s is the status of the container. containerText names the container in texts. It returns
// false if the container waits without an error, such as for init containers.
func (w *World) explainWaiting(p *corev1.Pod, s *corev1.ContainerStatus, containerText string, f *Finding) bool {
	message := singleLine(s.State.Waiting.Message)
	switch reason := s.State.Waiting.Reason; reason {
	case "", "ContainerCreating", "PodInitializing":
		return false
	case "ImagePullBackOff", "ErrImagePull", "InvalidImageName", "ErrImageNeverPull":
		w.explainImage(p, s, containerText, f)
	case "CrashLoopBackOff":
		w.explainCrashes(p, s, containerText, f)
	case "CreateContainerConfigError":
		f.What, f.Because = containerText+" cannot be made", message
		f.Mend = missingObjectCommands(p, s.State.Waiting.Message)
	default:
		f.What, f.Because = containerText+" does not start ("+reason+")", message
		f.Mend = []string{kctlCommand(p, "describe pod %s", p.Name)}
	}
	if f.Since == nil {
		f.Since = p.Status.StartTime
	}
	return true
}

// explainImage fills Finding f for a container with an image that cannot be pulled. s is the status
// of the container. containerText names the container in texts.
func (w *World) explainImage(p *corev1.Pod, s *corev1.ContainerStatus, containerText string, f *Finding) {
	reason, message := s.State.Waiting.Reason, singleLine(s.State.Waiting.Message)
	image := s.Image
	for _, c := range slices.Concat(p.Spec.InitContainers, p.Spec.Containers) {
		if c.Name == s.Name {
			image = c.Image
		}
	}
	f.What = fmt.Sprintf("%s waits for image %s", containerText, image)
	_, cause, backs := strings.Cut(message, "ErrImagePull: ")
	if backs {
		message = cause
	}
	f.Because = message
	if reason == "ImagePullBackOff" {
		f.Details = append(f.Details, "the node tries again at growing intervals, of five minutes at most")
		if e := w.newestEvent(p.UID, "Pulling"); e != nil {
			f.Details[0] += fmt.Sprintf("; last %s ago", shortDuration(w.Now.Sub(lastSeen(e))))
		}
	}
	object := templateOwner(p)
	if object == "" {
		object = "pod/" + p.Name
	}
	set := kctlCommand(p, "set image %s %s=IMAGE", object, s.Name)
	lower := strings.ToLower(message)
	switch {
	case reason == "ErrImageNeverPull":
		f.Because = "its imagePullPolicy is Never, and node " + p.Spec.NodeName + " does not have it"
		f.Mend = []string{set + "   # or imagePullPolicy: IfNotPresent"}
	case reason == "InvalidImageName":
		f.Mend = []string{set}
	case strings.Contains(lower, "unauthorized") || strings.Contains(lower, "denied") ||
		strings.Contains(lower, "401") || strings.Contains(lower, "403"):
		f.Details = append(f.Details, pullSecrets(p))
		f.Mend = []string{kctlCommand(p, "create secret docker-registry NAME --docker-server=REGISTRY "+
			"--docker-username=USER --docker-password=PASSWORD"),
			kctlCommand(p, `patch serviceaccount %s -p '{"imagePullSecrets":[{"name":"NAME"}]}'`, serviceAccount(p))}
	case strings.Contains(lower, "not found") || strings.Contains(lower, "404") ||
		strings.Contains(lower, "manifest unknown"):
		f.Mend = []string{set + "   # the registry has no such image or tag"}
	default:
		f.Mend = []string{set + "   # or mend the way from node " + p.Spec.NodeName + " to the registry"}
	}
}

func serviceAccount(p *corev1.Pod) string {
	if p.Spec.ServiceAccountName == "" {
		return "default"
	}
	return p.Spec.ServiceAccountName
}

func pullSecrets(p *corev1.Pod) string {
	if len(p.Spec.ImagePullSecrets) == 0 {
		return "the pod names no imagePullSecrets"
	}
	var names []string
	for _, r := range p.Spec.ImagePullSecrets {
		names = append(names, r.Name)
	}
	return "the pod's imagePullSecrets: " + strings.Join(names, ", ")
}

// explainCrashes fills Finding f for a container in CrashLoopBackOff, with the cause of its last
// termination. s is the status of the container. containerText names the container in texts.
func (w *World) explainCrashes(p *corev1.Pod, s *corev1.ContainerStatus, containerText string, f *Finding) {
	f.What = fmt.Sprintf("%s ends again and again (%s)", containerText, countNoun(int(s.RestartCount), "restart"))
	f.Mend = []string{kctlCommand(p, "logs %s -c %s --previous", p.Name, s.Name)}
	if delay, _, ok := strings.Cut(strings.TrimPrefix(s.State.Waiting.Message, "back-off "), " restarting"); ok {
		f.Details = append(f.Details, "it is started again after "+delay)
	}
	t := s.LastTerminationState.Terminated
	if t == nil {
		return
	}
	f.Since = timeOrNil(t.FinishedAt)
	f.Because = w.exitText(p, s.Name, t)
	if t.Reason == "OOMKilled" {
		object := templateOwner(p)
		if object != "" {
			f.Mend = append(f.Mend, kctlCommand(p, "set resources %s -c %s --limits=memory=MORE", object, s.Name))
		}
		return
	}
	if e := w.probeEvent(p, s.Name); e != nil && strings.HasPrefix(e.Message, "Liveness") ||
		e != nil && strings.HasPrefix(e.Message, "Startup") {
		f.Because += "; before that: " + singleLine(e.Message)
		f.Details = append(f.Details, probeOf(p, s.Name, "liveness"))
	}
}

// signals maps the numbers of signals that terminate containers to the names of these signals.
var signals = map[int32]string{1: "SIGHUP", 2: "SIGINT", 3: "SIGQUIT", 4: "SIGILL", 6: "SIGABRT", 7: "SIGBUS",
	8: "SIGFPE", 9: "SIGKILL",
	11: "SIGSEGV", 13: "SIGPIPE", 14: "SIGALRM", 15: "SIGTERM"}

// exitText returns a text about t, the termination of a container of pod p. The text contains the
// exit code or signal, how long the container ran, and its message. For an out-of-memory kill, it
// also contains the memory limit.
func (w *World) exitText(p *corev1.Pod, container string, t *corev1.ContainerStateTerminated) string {
	after := ""
	if !t.StartedAt.IsZero() && !t.FinishedAt.IsZero() {
		after = " after " + shortDuration(t.FinishedAt.Sub(t.StartedAt.Time))
	}
	signal := t.Signal
	if signal == 0 && t.ExitCode > 128 {
		signal = t.ExitCode - 128
	}
	text := fmt.Sprintf("ended with exit code %d%s", t.ExitCode, after)
	switch {
	case t.Reason == "OOMKilled":
		text = "was killed for lack of memory (OOMKilled)" + after +
			": it has no limit of its own, so the node had none left"
		if l := memoryLimit(p, container); l != "" {
			text = "was killed for lack of memory (OOMKilled)" + after + ": its limit is " + l
		}
	case signals[signal] != "":
		text = fmt.Sprintf("ended by signal %s (exit code %d)%s", signals[signal], t.ExitCode, after)
	case t.ExitCode == 127 || t.ExitCode == 126:
		text += ": its command is not there or not executable"
	}
	if m := singleLine(t.Message); m != "" {
		text += ": " + shortenMessage(m)
	}
	return text
}

// shortenMessage truncates a termination message to 200 bytes.
func shortenMessage(text string) string {
	const longest = 200
	if len(text) > longest {
		return strings.ToValidUTF8(text[:longest], "") + "…"
	}
	return text
}

// memoryLimit returns the memory limit of a container: its own, or else that of its pod. It returns
// "" if neither has a limit.
func memoryLimit(p *corev1.Pod, container string) string {
	for _, c := range slices.Concat(p.Spec.InitContainers, p.Spec.Containers) {
		if l, ok := c.Resources.Limits[corev1.ResourceMemory]; ok && c.Name == container {
			return l.String()
		}
	}
	if r := p.Spec.Resources; r != nil {
		if l, ok := r.Limits[corev1.ResourceMemory]; ok {
			return l.String()
		}
	}
	return ""
}

// missingObjectCommands returns commands that resolve an error message about a container or a
// volume of pod p. The message may name a missing ConfigMap, Secret, key or claim, or a file
// server. For other messages, the command describes the pod.
func missingObjectCommands(p *corev1.Pod, message string) []string {
	if server, at := fileServer(message); server != "" {
		return at(p, server)
	}
	if commands := iscsiTarget(p, message); commands != nil {
		return commands
	}
	lower := strings.ToLower(message)
	object := ""
	for _, kind := range []string{"configmap ", "secret ", "persistentvolumeclaim "} {
		if i := strings.Index(lower, kind+`"`); i >= 0 {
			object = firstQuoted(message[i:])
			object = object[strings.LastIndex(object, "/")+1:]
			break
		}
	}
	for _, kind := range []string{"ConfigMap", "Secret"} {
		if _, of, ok := strings.Cut(message, " in "+kind+" "); ok && strings.Contains(lower, "couldn't find key ") {
			_, key, _ := strings.Cut(message, "find key ")
			key, _, _ = strings.Cut(key, " ")
			of, _, _ = strings.Cut(of, " ")
			_, object, _ := strings.Cut(of, "/")
			return []string{kctlCommand(p, "edit %s %s   # give it key %s", strings.ToLower(kind), object, key)}
		}
	}
	switch {
	case strings.Contains(lower, "not found") && strings.Contains(lower, "configmap") && object != "":
		return []string{kctlCommand(p, "create configmap %s --from-literal=KEY=VALUE", object)}
	case strings.Contains(lower, "not found") && strings.Contains(lower, "secret") && object != "":
		return []string{kctlCommand(p, "create secret generic %s --from-literal=KEY=VALUE", object)}
	case strings.Contains(lower, "persistentvolumeclaim") && object != "":
		return []string{kctlCommand(p, "why persistentvolumeclaim/%s", object)}
	}
	return []string{kctlCommand(p, "describe pod %s", p.Name)}
}

// firstQuoted returns the first text in double quotes within a text, without the quotes, or "".
func firstQuoted(text string) string {
	_, rest, ok := strings.Cut(text, `"`)
	word, _, ends := strings.Cut(rest, `"`)
	if !ok || !ends {
		return ""
	}
	return word
}
