package replica

import (
	"context"
	"fmt"
	"net"
	"strconv"
	"time"
	"unicode"
	"unicode/utf8"

	"keelson.dev/keelson/raftstore"
)

// maxName is the longest name of a replica, in bytes: alarms about it hold that much.
const maxName = 256

// checkName refuses what cannot be the name of a replica.
func checkName(name string) error {
	switch {
	case name == "":
		return fmt.Errorf("%w: a replica needs a name", raftstore.ErrInvalid)
	case len(name) > maxName:
		return fmt.Errorf("%w: name of a replica has %d bytes, at most %d: %.64q...", raftstore.ErrInvalid, len(name), maxName, name)
	case !utf8.ValidString(name):
		return fmt.Errorf("%w: name of a replica %q is not valid UTF-8", raftstore.ErrInvalid, name)
	}
	for _, c := range name {
		if !unicode.IsPrint(c) {
			return fmt.Errorf("%w: name of a replica %q has %q in it, which cannot be printed", raftstore.ErrInvalid, name, c)
		}
	}
	return nil
}

// checkAddress refuses what nobody can dial. Whether somebody is there it does
// not know.
func checkAddress(address string) error {
	host, port, err := net.SplitHostPort(address)
	if err != nil || host == "" || !utf8.ValidString(host) {
		return fmt.Errorf("%w: address %q of a replica: want host:port", raftstore.ErrInvalid, address)
	}
	if n, err := strconv.Atoi(port); err != nil || n < 1 || n > 65535 {
		return fmt.Errorf("%w: address %q of a replica: want a port from 1 to 65535", raftstore.ErrInvalid, address)
	}
	return nil
}

// toAnswer leaves of the time for a call what it takes to say why it failed:
// else the caller behind another replica learns only that time is up.
func toAnswer(ctx context.Context) (context.Context, context.CancelFunc) {
	deadline, bounded := ctx.Deadline()
	if !bounded {
		return context.WithCancel(ctx)
	}
	return context.WithDeadline(ctx, deadline.Add(-min(time.Second, time.Until(deadline)/4)))
}
