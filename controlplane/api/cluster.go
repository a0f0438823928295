package api

// Paths of the control plane's own endpoints, which are not API resources. Requests are authorized
// by path, as for every non-resource URL.
const (
	PathClusterStatus = "/cluster/status" // GET: ClusterStatus
	// PathClusterCertificates: GET returns ClusterCertificates.
	PathClusterCertificates = "/cluster/certificates"
	// PathClusterKeys: GET returns ClusterKeys. POST ClusterRotate starts, speeds up or aborts the
	// rotation of a key.
	PathClusterKeys = "/cluster/keys"
	// PathClusterKubeconfig: POST ClusterKubeconfig returns ClusterKubeconfigResult.
	PathClusterKubeconfig = "/cluster/kubeconfig"
	// PathClusterHeartbeats: GET returns the time of the last heartbeat of each node that is
	// connected to the replica that serves the request, in Unix milliseconds.
	PathClusterHeartbeats = "/cluster/heartbeats"
	// POST ClusterRevoke: revokes the certificates of a node
	PathClusterRevoke = "/cluster/revoke"
	PathClusterTokens = "/cluster/tokens" // POST ClusterToken: creates a join token
	// GET: the members; POST ClusterJoin: adds a member; DELETE of a subpath: removes one
	PathClusterMembers  = "/cluster/members"
	PathClusterStepDown = "/cluster/step-down" // POST: ClusterStepDown
	PathClusterCompact  = "/cluster/compact"   // POST: ClusterCompact
	// PathClusterBackup: POST returns the backup file, followed by the trailer HeaderBackupSum. The
	// method is POST because a backup contains all Secrets: a client with permission to get every
	// path, such as a monitoring system, must not be able to read it. With the parameter recipient,
	// which may be repeated, the file is encrypted with age for those recipients and not with the
	// store's key.
	PathClusterBackup = "/cluster/backup"
	PathClusterVerify = "/cluster/backup/verify" // POST of a backup file: returns ClusterBackup
	// PathClusterSupport: POST ClusterSupport returns a ClusterSupportPart. The method is POST
	// because a daemon's log contains requests of clients: a client with permission to get every
	// path must not be able to read it.
	PathClusterSupport = "/cluster/support"
)

// ClusterRevoke requests that the certificates of a node are revoked.
type ClusterRevoke struct {
	Node string `json:"node"`
}

// ClusterToken requests a join token. By default, a token for nodes is valid for a day, and a token
// for replicas for an hour. The token can be used once for each of Names. If Names is empty, it can
// be used once, under any name.
type ClusterToken struct {
	Role string `json:"role"` // "node" or "controlplane"
	TTL  string `json:"ttl,omitempty"`
	Uses int    `json:"uses,omitempty"`
	// names under which a machine may join with the token
	Names []string `json:"names,omitempty"`
	// allows the token even if a Node with the name exists
	Replace bool `json:"replace,omitempty"`
}

// ClusterTokenResult is a new join token.
type ClusterTokenResult struct {
	Token string `json:"token"`
}

// HeaderBackupSum is the HTTP trailer after a backup: the SHA-256 of the file, in hex.
const HeaderBackupSum = "Keelson-Sha256"

// BackupMagic is the prefix of every backup file.
const BackupMagic = "keelback"

// BackupSealedMark is a text that occurs in the first kilobyte of every encrypted backup, and not
// in other backups.
const BackupSealedMark = `"KeyID":"`

// TrialPrefix is the prefix of the names of all temporary folders and files that are created to
// inspect a backup; the digits of os.MkdirTemp follow. Entries with this prefix that no process
// uses are removed.
const TrialPrefix = ".keelson-trial-"

// ClusterStatus is the status of the control plane. Sizes are in bytes.
type ClusterStatus struct {
	Cluster string `json:"cluster"`
	ID      string `json:"id"` // unique ID of this cluster
	// Incarnation is the number of recoveries and restores of the cluster. It is 0 if there were
	// none, or if the replica's release does not support the counter.
	Incarnation uint64 `json:"incarnation,omitempty"`
	Answered    string `json:"answeredBy"` // the replica that served the request
	Leader      string `json:"leader"`     // "" if no leader is known
	Term        uint64 `json:"term"`
	CommitIndex uint64 `json:"commitIndex"`
	Revision    uint64 `json:"revision"`
	// revision up to which (inclusive) watch history has been discarded
	Compacted    uint64 `json:"compacted"`
	Keys         int    `json:"keys"`
	Bytes        int64  `json:"bytes"`
	HistoryBytes int64  `json:"historyBytes"`
	// the limit of the sum of Bytes and HistoryBytes; 0 = no limit
	Quota int64 `json:"quota"`
	// the highest feature level that stored data may use
	FeatureLevel uint32 `json:"featureLevel"`
	// Work is the state of the leader's components: WorkWaiting or WorkBegun. It is empty if the
	// leader was not asked, or if its release does not report the state. Failing are the components
	// that failed recently, sorted by name.
	Work    string        `json:"work,omitempty"`
	Failing []ClusterPart `json:"failing,omitempty"`
	// Schedulers are the schedulerNames that the leader's scheduler serves. It is empty if the
	// leader's release does not report them.
	Schedulers []string `json:"schedulers,omitempty"`

	// Autopilot is the status of the leader's automatic replacement of dead replicas. It is nil if
	// the leader was not asked or does not replace replicas.
	Autopilot *ClusterAutopilot `json:"autopilot,omitempty"`

	Alarms  []ClusterAlarm  `json:"alarms"`
	Members []ClusterMember `json:"members"`
}

// States of the leader's components, in ClusterStatus.Work.
const (
	WorkWaiting = "waiting" // the replica is the leader and is still reading the cluster's state
	WorkBegun   = "begun"
)

// ClusterPart is a component of the leader that failed.
type ClusterPart struct {
	Name  string `json:"name"`        // "scheduler", a controller's name ...
	Since int64  `json:"sinceUnixMs"` // time of the last failure
	Error string `json:"error"`
}

// ClusterAutopilot is the status of the replacement of dead voters by standbys.
type ClusterAutopilot struct {
	// time without contact after which a voter is considered dead
	After int64 `json:"afterMs"`
	// the current action, or the reason why no replica is replaced
	State string `json:"state"`
	// time since which a dead voter cannot be replaced; 0 = no such voter
	Blocked int64 `json:"blockedSinceUnixMs,omitempty"`
	// the last replacements, oldest first
	Done []ClusterReplaced `json:"done,omitempty"`
}

// ClusterReplaced is a replacement of a dead voter by a standby.
type ClusterReplaced struct {
	Dead    string `json:"dead"`
	Standby string `json:"standby"` // the standby that became a voter
	At      int64  `json:"atUnixMs"`
}

// ClusterMember is one replica of the control plane.
type ClusterMember struct {
	Name    string `json:"name"`
	Address string `json:"address"` // address for connections from the other replicas
	Voter   bool   `json:"voter"`   // false for a standby and for a joining replica
	Leader  bool   `json:"leader"`
	Ready   string `json:"ready"` // "yes", or the reason why the replica is not ready

	// Applied is the index of the last log entry that the replica is known to have applied, 0 if
	// unknown. Lag is the number of later entries that the raft cluster has committed.
	Applied uint64 `json:"appliedIndex"`
	Lag     uint64 `json:"lag"`
	// Contact is the number of milliseconds since the last message from the replica. It is -1 if no
	// message has been received.
	Contact int64 `json:"lastContactMs"`

	// Only the replica itself can report these values; they are zero if it does not respond.
	Version  string `json:"version,omitempty"`
	Disk     int64  `json:"diskBytes,omitempty"`
	Watchers int    `json:"watchers,omitempty"`
	// FeatureLevel is the highest feature level that the replica's release supports.
	FeatureLevel uint32 `json:"featureLevel,omitempty"`
	// Standby reports whether the replica has no vote and is to replace a voter that dies.
	Standby bool `json:"standby,omitempty"`
	// Backups is the status of the replica's scheduled backups. It is nil if the replica makes no
	// backups, or if its release does not support them.
	Backups *ClusterMemberBackups `json:"backups,omitempty"`
	// StaleKeys describes a key of the replica from before a rotation, and the remedy. It is "" if
	// all its keys are current. StaleSince is the time at which the replica detected the key, in
	// Unix milliseconds.
	StaleKeys  string `json:"staleKeys,omitempty"`
	StaleSince int64  `json:"staleSinceUnixMs,omitempty"`
}

// ClusterMemberBackups is the status of a replica's scheduled backups. Times are in Unix
// milliseconds;
// 0 means that no such backup exists.
type ClusterMemberBackups struct {
	Last int64 `json:"lastUnixMs,omitempty"` // time of the newest successful backup
	Next int64 `json:"nextUnixMs,omitempty"` // time of the next backup
	// failed attempts since the last successful backup
	Failures int    `json:"failures,omitempty"`
	Since    int64  `json:"sinceUnixMs,omitempty"` // time of the first of these failures
	Error    string `json:"error,omitempty"`       // the error of the last failure
}

// ClusterAlarm is a condition that needs an operator's attention.
type ClusterAlarm struct {
	// "space", "diverged", "unreadable", "too old", "backups", "autopilot", "elections",
	// "rotation", "stale keys", "abandoned", "not renewed" or "expiring"
	Kind    string `json:"kind"`
	Member  string `json:"member,omitempty"` // the replica that the alarm concerns; "" = all
	Since   int64  `json:"sinceUnixMs"`
	Message string `json:"message"`
	Remedy  string `json:"remedy"` // the action that resolves the alarm
}

// ClusterJoin requests that a replica becomes a member.
type ClusterJoin struct {
	Name    string `json:"name"`
	Address string `json:"address"` // host:port of the replica's peer listener
	// Standby requests membership without a vote. A release that does not support standbys rejects
	// the field.
	Standby bool `json:"standby,omitempty"`
}

// ClusterStepDown requests a leadership transfer to the replica To. If To is empty, the leader
// chooses the best candidate.
type ClusterStepDown struct {
	To string `json:"to,omitempty"`
}

// ClusterStepDownResult contains the previous and the new leader.
type ClusterStepDownResult struct {
	From string `json:"from"`
	To   string `json:"to"`
}

// ClusterCompact requests that watch history up to and including Revision is discarded. 0 means all
// watch history.
type ClusterCompact struct {
	Revision uint64 `json:"revision"`
}

// ClusterCompactResult is the state of the watch history after a compaction.
type ClusterCompactResult struct {
	Compacted    uint64 `json:"compacted"`
	HistoryBytes int64  `json:"historyBytes"`
}

// ClusterBackup describes the contents of a backup file.
type ClusterBackup struct {
	Cluster  string `json:"cluster"` // the ID of the backup's cluster
	Revision uint64 `json:"revision"`
	Created  int64  `json:"createdUnixMs"`
	Keys     int    `json:"keys"`
	Bytes    int64  `json:"bytes"`
	Format   uint32 `json:"format"`
	Sealed   bool   `json:"sealed"` // the backup is encrypted: restoring it needs a key of the cluster
	// KeyID is the ID of the key, in a key file, that decrypts the backup. It is "" if the backup
	// is not encrypted.
	KeyID string `json:"keyID,omitempty"`
	// Recipients are the types of the age recipients for which the backup is encrypted, one for
	// each recipient. It is empty if the backup is not encrypted with age.
	Recipients []string `json:"recipients,omitempty"`
	// FeatureLevel is the feature level of the backup's data formats. A release that supports only
	// lower levels does not restore it.
	FeatureLevel uint32 `json:"featureLevel,omitempty"`
	// Kinds are the backup's contents by resource, sorted by Place. It is nil if the file is
	// encrypted and was not decrypted.
	Kinds []ClusterBackupKind `json:"kinds,omitempty"`
}

// ClusterBackupKind contains the number and size of the objects of one resource in a backup.
type ClusterBackupKind struct {
	Place    string `json:"place"`              // prefix of the objects' keys
	Group    string `json:"group,omitempty"`    // API group of the resource; "" for the core group
	Resource string `json:"resource,omitempty"` // "" for records of the cluster itself
	// Version is the version in which the objects are stored, and Hidden reports whether clients
	// cannot read them. Both are set only by the server that made the backup.
	Version string `json:"version,omitempty"`
	Hidden  bool   `json:"hidden,omitempty"`
	Objects int    `json:"objects"`
	// number of objects that have a TTL, as Events have
	Expiring int   `json:"expiring,omitempty"`
	Bytes    int64 `json:"bytes"` // total size of keys and values
}

// ClusterSupport requests diagnostic data of the given replica. An empty name means the replica
// that receives the request.
type ClusterSupport struct {
	Replica string `json:"replica,omitempty"`
}

// ClusterSupportPart is the diagnostic data of a replica.
type ClusterSupportPart struct {
	Replica    string            `json:"replica"`
	Version    string            `json:"version"`
	Go         string            `json:"go"`
	Goroutines int               `json:"goroutines"`
	Flags      map[string]string `json:"flags,omitempty"`
	Log        string            `json:"log"`               // the last lines of the log
	Metrics    string            `json:"metrics"`           // in the Prometheus text format
	Problem    string            `json:"problem,omitempty"` // the reason why data is missing; "" if it is complete
}

// AgentLogPath is the path in the HTTP API of a node that returns the last lines of the agent's
// log.
const AgentLogPath = "/logs/keelson-agent.log"

// AgentSettingsPath is the path in the HTTP API of a node that returns the agent's settings, one
// per line. Older agents do not serve it.
const AgentSettingsPath = "/logs/keelson-agent-settings.txt"

// ClusterCertificates are the certificates of a cluster, except those that were issued to users and
// workloads.
type ClusterCertificates struct {
	Certificates []ClusterCertificate `json:"certificates"`
	// Silent contains the replicas that did not report their certificates. It maps their names to
	// the reason.
	Silent map[string]string `json:"silent,omitempty"`
}

// ClusterCertificate is a certificate as reported by the replica or node that uses it. Times are in
// seconds since 1970.
type ClusterCertificate struct {
	// the purpose of the certificate; for a CA, the kind of certificates that it signs
	Use       string `json:"use"`
	Holder    string `json:"holder"` // the replica or the node that has the certificate
	Node      bool   `json:"node,omitempty"`
	Authority bool   `json:"authority,omitempty"`
	// whether a CA signs new certificates; otherwise it is only trusted
	Signs   bool   `json:"signs,omitempty"`
	Subject string `json:"subject"`
	// the first 16 characters of the SHA-256 of the public key
	Key     string `json:"key"`
	Begins  int64  `json:"begins"`
	Expires int64  `json:"expires"`
	Renews  int64  `json:"renews,omitempty"` // time of the next automatic renewal; 0 = never
}

// ClusterRotate requests the rotation of a key that all replicas share. Kind is cluster-ca,
// peers-ca, service-account-key or encryption-key.
type ClusterRotate struct {
	Kind string `json:"kind,omitempty"`
	// Keep is the duration for which the old key stays trusted after the new key is in use. ""
	// means the default of Kind.
	Keep string `json:"keep,omitempty"`
	// Abort aborts the rotation in progress. That is possible until the new key is in use.
	Abort bool `json:"abort,omitempty"`
	// Force shortens the rotation in progress. It then no longer waits for replicas that do not
	// respond, once all others trust the new key. It waits neither for certificates and tokens that
	// the old key has signed, nor for nodes that are offline.
	Force bool `json:"force,omitempty"`
	// Dismiss is the name of a removed replica. The replica's copies of the keys must already be
	// destroyed. The request removes the replica from ClusterKeys.Removed. All other fields must be
	// empty. A release that does not support the field rejects it.
	Dismiss string `json:"dismiss,omitempty"`
}

// ClusterKeys are the IDs of the keys that all replicas share, and the latest rotation.
type ClusterKeys struct {
	Rotation *ClusterRotation   `json:"rotation,omitempty"`
	Replicas []ClusterKeyHolder `json:"replicas"`
	// the replicas, nodes or conditions that the rotation waits for
	Waiting []string `json:"waiting,omitempty"`
	// Removed are removed members that had keys which are still valid.
	Removed []ClusterRemoved `json:"removed,omitempty"`
}

// ClusterRemoved is a replica that is no longer a member. At is the time of its removal, in Unix
// milliseconds.
type ClusterRemoved struct {
	Name  string   `json:"name"`
	At    int64    `json:"atUnixMs"`
	Kinds []string `json:"kinds"` // kinds of the replica's keys that are still used or trusted
}

// ClusterKubeconfig requests the data for a kubeconfig. CSR, in PEM, requests a client certificate
// for the caller's own identity. Only the public key of the CSR is used.
type ClusterKubeconfig struct {
	CSR []byte `json:"csr,omitempty"`
}

// ClusterKubeconfigResult contains the trusted CA certificates and, if the request had a CSR, the
// client certificate, all in PEM.
type ClusterKubeconfigResult struct {
	CA          []byte `json:"ca"`
	Certificate []byte `json:"certificate,omitempty"`
}

// ClusterRotation is the rotation of one key. Its steps are trust, use, wait, serve (only for
// cluster-ca), forget, done, and aborted. Times are in Unix milliseconds. Until is 0 before the
// step wait.
type ClusterRotation struct {
	Kind    string `json:"kind"`
	New     string `json:"new"`
	Old     string `json:"old"`
	Step    string `json:"step"`
	By      string `json:"by,omitempty"`
	Started int64  `json:"startedUnixMs"`
	Since   int64  `json:"sinceUnixMs"`
	Until   int64  `json:"untilUnixMs,omitempty"`
	Force   bool   `json:"force,omitempty"`
}

// ClusterKeyHolder is a replica with the keys that it currently uses. Problem is the reason why the
// replica did not report them.
type ClusterKeyHolder struct {
	Name    string           `json:"name"`
	Problem string           `json:"problem,omitempty"`
	Keys    []ClusterKeyHeld `json:"keys,omitempty"`
	// Nodes are the nodes connected to the replica. Users are the users of client certificates of
	// the old CA that the replica has seen, by serial number. Replicas report both to each other
	// during a rotation of cluster-ca.
	Nodes []ClusterNodeKeys      `json:"nodes,omitempty"`
	Users map[string]ClusterUser `json:"users,omitempty"`
}

// ClusterNodeKeys contains the IDs of the CA keys that a node uses: those that it trusts
// (Believes), and those that have signed its certificates (Shows). Silent means that the agent's
// release does not report them.
type ClusterNodeKeys struct {
	Name     string   `json:"name"`
	Silent   bool     `json:"silent,omitempty"`
	Believes []string `json:"believes,omitempty"`
	Shows    []string `json:"shows,omitempty"`
}

// ClusterUser is the user of a client certificate that a replica has seen. Times are in Unix
// milliseconds.
type ClusterUser struct {
	Name string `json:"name"`
	Ends int64  `json:"endsUnixMs"`
	Seen int64  `json:"seenUnixMs"`
}

// ClusterKeyHeld contains a replica's keys of one kind. Problem is the reason why the replica
// cannot accept a new key.
type ClusterKeyHeld struct {
	Kind     string   `json:"kind"`
	Signs    string   `json:"signs,omitempty"`
	Believes []string `json:"believes,omitempty"`
	// the CA that signed the API's serving certificate; only for cluster-ca
	Serves  string `json:"serves,omitempty"`
	Problem string `json:"problem,omitempty"`
}
