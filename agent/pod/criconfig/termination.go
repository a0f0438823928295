package criconfig

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	v1 "k8s.io/api/core/v1"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"keelson.dev/keelson/agent/pod/podfiles"
	"keelson.dev/keelson/internal/safepath"
)

// addTerminationFile creates the termination message file of a container, and adds its mount and
// its path to config.
func (b *Builder) addTerminationFile(pod *v1.Pod, spec *v1.Container, attempt uint32,
	config *cri.ContainerConfig) error {
	if spec.TerminationMessagePath == "" {
		return nil
	}
	file := podfiles.TerminationMessagePath(b.cfg.Paths, pod.UID, spec.Name, attempt)
	if err := os.MkdirAll(filepath.Dir(file), 0o750); err != nil {
		return fmt.Errorf("create the termination message file of container %q: %w", spec.Name, err)
	}
	if err := os.WriteFile(file, nil, 0o666); err != nil {
		return fmt.Errorf("create the termination message file of container %q: %w", spec.Name, err)
	}
	// The container may run as any user, so the mode must not depend on this process's umask.
	if err := os.Chmod(file, 0o666); err != nil {
		return fmt.Errorf("create the termination message file of container %q: %w", spec.Name, err)
	}
	config.Annotations[AnnotationMessageFile] = file
	config.Mounts = append(config.Mounts, &cri.Mount{ContainerPath: spec.TerminationMessagePath, HostPath: file})
	return nil
}

// ReadTerminationMessage returns the termination message of an ended container. With policy
// FallbackToLogsOnError, the message of a failed container may come from its log.
func (b *Builder) ReadTerminationMessage(pod *v1.Pod, status *cri.ContainerStatus) string {
	msg := ""
	if f := status.Annotations[AnnotationMessageFile]; f != "" {
		msg = readHead(f, maxMessage)
	}
	if msg == "" && status.ExitCode != 0 &&
		status.Annotations[annotationMessagePolicy] == string(v1.TerminationMessageFallbackToLogsOnError) {
		file := status.LogPath
		if !filepath.IsAbs(file) {
			file = filepath.Join(podfiles.LogDirectory(b.cfg.Paths.Logs, pod), file)
		}
		msg = readLogTail(file)
	}
	if msg == "" {
		msg = status.Message
	}
	return msg
}

// The limits of one container's termination message that Kubernetes documents: of its file, and of
// the part of the log that replaces it.
const (
	maxMessage      = 4096
	maxMessageLog   = 2048
	maxMessageLines = 80
)

func readHead(file string, limit int64) string {
	f, err := safepath.OpenRegular(file)
	if err != nil {
		return ""
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, limit))
	if err != nil {
		return ""
	}
	return string(b)
}

// readLogTail returns the text of the last lines of a CRI log file, up to the limits of a
// termination message.
func readLogTail(file string) string {
	f, err := safepath.OpenRegular(file)
	if err != nil {
		return ""
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return ""
	}
	// Each line has a prefix of about 40 bytes, and its longest part has 16 KiB: read enough for
	// all limits.
	offset := max(0, st.Size()-maxMessageLog-maxMessageLines*64-17<<10)
	b, err := io.ReadAll(io.NewSectionReader(f, offset, st.Size()-offset))
	if err != nil {
		return ""
	}
	lines := strings.SplitAfter(string(b), "\n")
	if offset > 0 && len(lines) > 0 {
		lines = lines[1:]
	}
	lines = lines[max(0, len(lines)-maxMessageLines-1):]
	var out strings.Builder
	for _, l := range lines {
		part := strings.SplitN(l, " ", 4) // time, stream, tag, text
		if len(part) < 4 {
			continue
		}
		if part[2] == "P" {
			part[3] = strings.TrimSuffix(part[3], "\n")
		}
		out.WriteString(part[3])
	}
	s := out.String()
	return s[max(0, len(s)-maxMessageLog):]
}
