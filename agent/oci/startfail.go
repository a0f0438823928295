package oci

import (
	"strings"
	"time"

	"keelson.dev/keelson/internal/durable"
)

// A command that cannot be executed fails the start of its container, as with containerd. The
// container ends with the reason StartError and exit code 128, and its pod's restart policy
// applies. libcontainer resolves the command at creation. The error is therefore kept in the
// container's record until the start.

const (
	startErrorReason = "StartError"
	startErrorCode   = 128

	// maxStartError bounds the stored error in bytes: the error quotes the command.
	maxStartError = 4096
)

// initError returns libcontainer's error text if the init process of a new container failed: its
// command, working directory or a mount is wrong. It returns "" for all other errors.
func initError(err error) string {
	const init, whole = "error during container init: ", "unable to start container process: "
	text := err.Error()
	at := strings.Index(text, init)
	if at < 0 {
		return ""
	}
	if i := strings.Index(text[:at], whole); i >= 0 {
		at = i
	}
	if text = text[at:]; len(text) > maxStartError {
		text = text[:maxStartError]
	}
	return strings.ToValidUTF8(strings.TrimSpace(text), "")
}

// failStart ends a container with a start error in its record. It writes the exit file first,
// because no shim does.
func (r *Runtime) failStart(c *ctr) error {
	now := time.Now().UnixNano()
	e := exitRecord{Code: startErrorCode, Started: now, Finished: now}
	if err := durable.Replace(r.exitFile(c.rec.ID), []byte(endText(e, ""))); err != nil {
		return err
	}
	r.containerEnded(c, e)
	return nil
}

// adoptFailedStart ends a container with a start error if an earlier agent process tried to start
// it, or if its sandbox has no shim any more. Otherwise the container still waits for its start.
func (r *Runtime) adoptFailedStart(c *ctr, hasShim bool) error {
	if e, err := r.readExit(c.rec.ID); err == nil {
		r.containerEnded(c, e)
		return nil
	}
	if hasShim {
		return nil
	}
	return r.failStart(c)
}
