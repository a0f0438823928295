// Package clusterid compares the identities of clusters. When a cluster is recovered from one
// replica or restored from a backup, a new incarnation of it starts. Replicas that keep the data of
// an earlier incarnation are abandoned. Replicas, agents and kctl send their identity with each
// request and refuse a partner of an earlier incarnation.
package clusterid

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"
)

// Header (for HTTP) and Key (for gRPC metadata) carry the encoded identity in requests and
// responses. A release that does not support identities sends neither of them; its requests are
// accepted.
const (
	Header = "Keelson-Identity"
	Key    = "keelson-identity"
)

const (
	// maxIncarnation is the largest incarnation: JSON numbers are exact up to it.
	maxIncarnation = 1<<53 - 1
	maxText        = 512 // largest number of bytes of an encoded identity
)

// Identity identifies one incarnation of one cluster. A new incarnation starts when the cluster is
// recovered from one replica or restored from a backup.
type Identity struct {
	Cluster string // the cluster's ID; "" = unknown
	// Incarnation is 0 until the cluster is recovered or restored for the first time. After that it
	// is the time of the last recovery or restore, in milliseconds since 1970, or a larger number
	// if a clock was wrong. Later incarnations have larger numbers.
	Incarnation uint64
}

// String encodes the identity as CLUSTER/INCARNATION.
func (i Identity) String() string { return i.Cluster + "/" + strconv.FormatUint(i.Incarnation, 10) }

var errMalformed = errors.New("malformed cluster identity: want CLUSTER/INCARNATION")

// Parse decodes an identity that was encoded by String. Any other text is an error.
func Parse(text string) (Identity, error) {
	at := strings.LastIndexByte(text, '/')
	if at < 0 || len(text) > maxText {
		return Identity{}, errMalformed
	}
	n, err := strconv.ParseUint(text[at+1:], 10, 64)
	if err != nil || n > maxIncarnation {
		return Identity{}, errMalformed
	}
	return Identity{text[:at], n}, nil
}

// Before reports whether i is an earlier incarnation of the same cluster as other.
func (i Identity) Before(other Identity) bool {
	return i.Cluster != "" && i.Cluster == other.Cluster && i.Incarnation < other.Incarnation
}

// Next returns the number of the new incarnation of a cluster that is recovered or restored at
// recoveredAt. It is larger than latest, the largest known number.
func Next(latest uint64, recoveredAt time.Time) uint64 {
	return min(max(latest+1, uint64(max(0, recoveredAt.UnixMilli()))), maxIncarnation)
}

// StartTime returns the time of the recovery or restore that started this incarnation, formatted as
// RFC 3339 in UTC.
func (i Identity) StartTime() string {
	return time.UnixMilli(int64(i.Incarnation)).UTC().Format(time.RFC3339)
}

// AbandonedError reports that a replica has the data of an earlier incarnation of its cluster and
// must not be used.
type AbandonedError struct {
	Replica string   // name or address of the replica
	Newest  Identity // the latest known identity of the cluster
}

func (e *AbandonedError) Error() string {
	return fmt.Sprintf("replica %s has data of cluster %s from before its recovery or restore of %s and is abandoned: "+
		"use another replica, "+
		"and on the machine of this one stop it and run 'keelson-controlplane rebuild --server "+
		"ADDRESS-OF-A-RECOVERED-REPLICA'",
		e.Replica, e.Newest.Cluster, e.Newest.StartTime())
}
