package oci

import (
	"strings"
	"time"

	"keelson.dev/keelson/internal/durable"
)

// A command that cannot be executed fails the start of its container, as with containerd: the container ends with the
// reason StartError and code 128, and its pod's restart policy applies. libcontainer looks the command up while it
// creates the container. The error is therefore kept in the container's record until the start.

const (
	startErrorReason = "StartError"
	startErrorCode   = 128

	// maxStartError bounds the bytes of an error that the record keeps: the error quotes the command.
	maxStartError = 4096
)

// initError returns libcontainer's text for an error that the init process of a new container reported: its command,
// working directory or a mount is wrong. It is empty for all other errors.
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

// failStart ends a container whose record has a start error. The end is on disk first: no shim records it.
func (r *Runtime) failStart(c *ctr) error {
	now := time.Now().UnixNano()
	e := exitRecord{Code: startErrorCode, Started: now, Finished: now}
	if err := durable.Replace(r.exitFile(c.rec.ID), []byte(endText(e, ""))); err != nil {
		return err
	}
	r.containerEnded(c, e)
	return nil
}

// adoptFailedStart ends a container whose record has a start error if an earlier run tried the start, or if its
// sandbox has no shim any more. Otherwise the container still waits for its start.
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
