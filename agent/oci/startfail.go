package oci

import (
	"strings"
	"time"

	"keelson.dev/keelson/internal/durable"
)

// A command that cannot be executed makes the start of its container fail, as with containerd. The
// container exits with the reason StartError and exit code 128, and its pod's restart policy
// applies. libcontainer resolves the command when the container is created. The error is therefore
// kept in the container's record until the start.

const (
	startErrorReason = "StartError"
	startErrorCode   = 128

	// maxStartError bounds the stored error in bytes: the error quotes the command.
	maxStartError = 4096
)

// initErrorText returns libcontainer's error text if the init process of a new container failed:
// its command, working directory or a mount is wrong. It returns "" for all other errors.
func initErrorText(err error) string {
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

// failStart marks a container with a start error in its record as exited. It writes the exit file
// first, because no shim writes it.
func (c *container) failStart() error {
	now := time.Now().UnixNano()
	e := exitRecord{Code: startErrorCode, Started: now, Finished: now}
	if err := durable.Write(c.runtime.paths.exitFile(c.rec.ID), []byte(endText(e, "")), durable.Atomic); err != nil {
		return err
	}
	c.recordContainerEnd(e)
	return nil
}

// adoptFailedStart handles a container with a start error. It marks the container as exited if an
// earlier agent process tried to start it or if its sandbox has no shim. Otherwise the container
// still waits for its start.
func (c *container) adoptFailedStart(hasShim bool) error {
	if e, err := c.runtime.paths.readExitRecord(c.rec.ID); err == nil {
		c.recordContainerEnd(e)
		return nil
	}
	if hasShim {
		return nil
	}
	return c.failStart()
}
