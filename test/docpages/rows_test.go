package docpages

// row says of a command line which tests run it, or in a sentence why none does.
type row struct {
	line string
	by   string // tests, with commas between, which run it, or what it says in other words
	why  string
	off  string // why none of those tests runs it on a machine
	as   string // another line, which is the same but for a name
}

// Tests on machines, and what is named more than once.
const (
	here    = "TestDocsOnMachines"
	rest    = "TestMachines"
	page    = "TestOperatePage"
	making  = "it builds or boots what the tests on machines are made of: 'make test-vm' runs it first"
	aLab    = "it is of a lab on one computer"
	itself  = "it is the test"
	pattern = "it stands for all verbs of that program"
)

// rows are all command lines of the pages for operators. What a sentence says by its first words alone, as 'kctl cluster up' for
// 'kctl cluster up -f cluster.yaml', is that line.
var rows = []row{
	// install
	{line: "tar -xzf keelson-v1.0.0-linux-amd64.tar.gz && cd keelson-v1.0.0-linux-amd64", by: here},
	{line: "sudo ./install.sh server --init --advertise-address 192.0.2.11 --init-flag=--replica-token-uses=2", by: here + ", TestPagesMakeThreeReplicas"},
	{line: "sudo ./install.sh server --server 192.0.2.11 --token keelson1.controlplane...", by: here},
	{line: "sudo ./install.sh agent  --server 192.0.2.11 --token keelson1.node...", by: here},
	{line: "sudo dpkg -i keelson-v1.0.0-linux-amd64.deb", by: here},
	{line: "systemctl enable --now keelson-agent", by: "TestAnAgentIsInstalledAndTakenAway, " + here},
	{line: "kctl cluster up -f cluster.yaml --dry-run", by: here + ", " + rest},
	{line: "kctl cluster up -f cluster.yaml", by: here + ", " + rest},
	{line: "kctl cluster upgrade -f cluster.yaml --to FILE", by: rest},
	{line: "kctl cluster add -f cluster.yaml", by: here + ", " + rest},
	{line: "kctl cluster remove w3 -f cluster.yaml", by: rest},
	{line: "kctl cluster reset -f cluster.yaml", by: rest},
	{line: "kctl cluster remove cp1", by: "TestClusterWithStandbys, " + here},
	{line: "install.sh --settings FILE", by: "TestSettingsAreBrought, " + here},
	{line: "systemctl edit keelson-controlplane", by: here},
	{line: "keelson-agent check", by: "TestCheckOfSettings, TestSettingsThatAreWrong, " + here},
	{line: "keelson-controlplane check", by: "TestSettingsOfTheFile, TestSettingsThatAreGood, TestSettingsThatAreWrong, " + here},
	{line: "make test-vm", why: itself},
	{line: "make test-vm-docs", why: itself},
	{line: "KEEP=DIR make test-vm-docs", why: itself},
	{line: "make vm-up", why: making},
	{line: "make vm-down", why: making},
	{line: "make dist", why: making},
	{line: "ARCHES=amd64 make dist", why: making},
	{line: "vagrant up", why: "it needs libvirt or VirtualBox; TestVagrantfile has Vagrant itself read the file"},
	{line: "/usr/lib/keelson/uninstall.sh", by: "TestAnAgentIsInstalledAndTakenAway, " + rest},
	{line: "systemctl stop keelson-agent keelson-pods", by: here},
	{line: "systemctl start keelson-agent", by: "TestAnAgentIsInstalledAndTakenAway, " + here},
	{line: "systemctl set-property keelson.slice MemoryMax=...", by: here},

	// operate
	{line: "make up", why: "each test on a lab begins with it"},
	{line: "kctl cluster status", by: page + ", " + here},
	{line: "kctl get nodes", by: page + ", " + here},
	{line: "kctl get --raw '/readyz?verbose'", by: page + ", " + here},
	{line: "kctl why node/w2", by: page + ", " + here},
	{line: "kctl why node/w3", as: "kctl why node/w2"},
	{line: "journalctl -u keelson-controlplane", by: here},
	{line: "journalctl -u keelson-agent", by: here},
	{line: "kctl lab status", why: aLab},
	{line: "kctl drain w3 --ignore-daemonsets --delete-emptydir-data", by: page + ", " + here},
	{line: "kctl get node w3", by: page + ", " + here},
	{line: "kctl uncordon w3", by: page + ", " + here},
	{line: "kctl delete node w3", by: "TestClusterCARotates, " + here},
	{line: "kctl taint node w3 node.kubernetes.io/out-of-service=nodeshutdown:NoExecute", by: "TestAttachedVolumesMove, " + here},
	{line: "kctl cluster transfer-leader", by: page + ", " + here},
	{line: "kctl cluster member list", by: page + ", " + here},
	{line: "systemctl stop keelson-controlplane", by: here},
	{line: "token=$(kctl cluster token create --names w9 --ttl 1h)", by: page + ", " + here},
	{line: "kctl cluster token list", by: page + ", " + here},
	{line: `kctl cluster token delete "$token"`, by: page + ", " + here},
	{line: "kctl cluster revoke node/w3", as: "kctl cluster revoke node/NAME"},
	{line: "kctl cluster member remove cp3", as: "kctl cluster member remove cp2"},
	{line: "kctl cluster certs", by: page + ", " + here},
	{line: `cp "$KUBECONFIG" renewed && KUBECONFIG=renewed kctl cluster renew`, by: page + ", " + here},
	{line: "KUBECONFIG=renewed kctl get namespace kube-system", by: page + ", " + here},
	{line: "kctl cluster backup today", by: page + ", " + here},
	{line: "kctl cluster backup inspect today", by: "TestRestoreDrill, " + here},
	{line: "kctl cluster restore-test today", by: "TestRestoreDrill, " + here},
	{line: "kctl cluster compact", by: page + ", " + here},
	{line: "kctl top", by: "TestAutoscalingByCPU, " + here},
	{line: "kctl create deployment looked-at --image=keelson.dev/hello:v1", by: page + ", " + here},
	{line: "kctl rollout status deployment/looked-at --timeout=60s", by: page + ", " + here},
	{line: "kctl trace deployment/looked-at", by: page + ", " + here},
	{line: "kctl why deployment/looked-at", by: page + ", " + here},
	{line: "kctl delete deployment looked-at --wait=false", by: page + ", " + here},
	{line: "kctl net trace POD SERVICE", by: "TestTrace, " + here},
	{line: "kctl net policies", by: "TestNetPolicies, " + here},
	{line: "kctl net services", by: "TestNetServices, " + here},
	{line: "kctl cluster support-bundle bundle.tar.gz", by: page + ", " + here},
	{line: "tar -tzf bundle.tar.gz", by: page + ", " + here},

	// upgrade
	{line: "kctl cluster upgrade -f cluster.yaml --to keelson-v1.1.0-linux-amd64.tar.gz --dry-run", by: "TestClusterUpgrade, " + here},
	{line: "kctl cluster upgrade -f cluster.yaml --to keelson-v1.1.0-linux-amd64.tar.gz", by: "TestClusterUpgrade, TestMachines, " + here},
	{line: "kctl cluster upgrade -f cluster.yaml --to ./dist --drain w1,w2 --skip cp3", by: "TestClusterUpgrade, " + here},
	{line: "kctl lab upgrade --to DIR --dry-run", why: aLab + "; TestUpgradeAndBack runs it with --drain"},
	{line: "kctl lab upgrade --to DIR", by: "TestUpgradeAndBack", off: aLab},
	{line: "kctl lab upgrade --to DIR --drain w1,w2", by: "TestUpgradeAndBack", off: aLab},
	{line: "kctl lab replace HOST --bin DIR", by: "TestUpgradeAndBack", off: aLab},
	{line: "kctl get nodes -o wide", by: here},
	{line: "sudo ./install.sh server --server 192.0.2.12", by: "TestAReplicaJoins, " + here},
	{line: "sudo ./install.sh agent --server 192.0.2.11", by: "TestAnAgentIsInstalledAndTakenAway, " + here},
	{line: "sudo dpkg -i keelson-v1.1.0-linux-amd64.deb", by: here},
	{line: "keelson-controlplane --version", by: here},

	// recover
	{line: "kctl cluster VERB", why: pattern},
	{line: "keelson-controlplane VERB", why: pattern},
	{line: "kctl cluster backup verify FILE", by: "TestBackupAndRestore", off: "it reads a file, whatever the machine"},
	{line: "kctl cluster restore-test", by: "TestRestoreDrill, " + here},
	{line: "kctl cluster restore-test --fresh", by: "TestRestoreDrill, " + here},
	{line: "keelson-controlplane inspect", by: "TestReplicaRebuilt, TestOfflineVerbs, " + here},
	{line: "keelson-controlplane rebuild", by: "TestReplicaRebuilt, TestOfflineVerbs, " + here},
	{line: "kctl cluster member remove cp2", by: "TestReplicaRebuilt, " + here},
	{line: "keelson-controlplane join --advertise-address OWN-ADDRESS --token TOKEN --server ADDRESS-OF-ANOTHER", by: "TestMajorityLost, " + here},
	{line: "keelson-controlplane join --standby --advertise-address OWN-ADDRESS --token TOKEN --server ADDRESS-OF-ANOTHER", by: "TestADeadReplicaIsReplaced, " + here},
	{line: "sudo ./install.sh server --standby --server ADDRESS-OF-ANOTHER --token TOKEN", by: "TestAReplicaJoins, " + here},
	{line: "kctl cluster token create --role controlplane", by: "TestMajorityLost, " + here},
	{line: "kctl lab up --standbys 1 --control-plane-flag=--replace-dead-after=30s", by: "TestADeadReplicaIsReplaced", off: aLab},
	{line: "keelson-controlplane recover", by: "TestMajorityLost, TestOfflineVerbs, " + here},
	{line: "systemctl start keelson-controlplane", by: "TestAServerIsInstalled, " + here},
	{line: "keelson-controlplane rebuild --server ADDRESS-OF-THAT-ONE", by: "TestMajorityLost, TestReplicaRebuilt, " + here},
	{line: "keelson-controlplane rebuild --server ADDRESS-OF-THE-FIRST", by: "TestBackupAndRestore, " + here},
	{line: "kctl cluster backup serve /backups/today", by: "TestRestoreDrill, " + here},
	{line: "KUBECONFIG=... kubectl get configmap NAME -o yaml", by: "TestRestoreDrill, " + here},
	{line: "keelson-controlplane backup list", by: "TestBucket, " + here},
	{line: "keelson-controlplane backup fetch /root/newest", by: "TestBucket, " + here},
	{line: "keelson-controlplane backup inspect /root/newest", by: "TestRestoreDrill, " + here},
	{line: "keelson-controlplane restore /root/newest --replace", by: "TestBackupAndRestore, TestOfflineVerbs, " + here},
	{line: "keelson-controlplane init --advertise-address OWN-ADDRESS --cluster-name NAME", by: "TestBackupAndRestore, " + here},
	{line: "keelson-controlplane restore /root/newest --any-cluster --backup-keys OLD-STORE.KEYS", by: "TestBackupAndRestore, " + here},
	{line: "kctl cluster token create --names w1,w2 --replace", by: "TestRevokedNode, " + here},
	{line: "sudo sh -c 'umask 077 && echo TOKEN >/var/lib/keelson/join-token' && sudo systemctl restart keelson-agent", by: "TestRevokedNode, " + here},

	// secure
	{line: "kctl cluster rotate service-account-key", by: "TestKeysRotate, " + here},
	{line: "kctl cluster rotate cluster-ca", by: "TestTheCAIsExchangedUnderLoad, " + here},
	{line: "kctl cluster rotate peers-ca", by: "TestKeysRotate, " + here},
	{line: "kctl cluster rotate encryption-key", by: "TestKeysRotate, " + here},
	{line: "kctl cluster rotate --status", by: "TestTheCAIsExchangedUnderLoad, " + here},
	{line: "kctl cluster rotate --abort", by: "TestClusterCARotates, " + here},
	{line: "kctl cluster renew", by: "TestRenewKubeconfig, " + here},
	{line: "kctl rollout restart deployment/NAME", by: "TestWorkerPartitioned, " + here},
	{line: "kctl delete node NAME", as: "kctl delete node w3"},
	{line: "kctl cluster token create --names NAME --replace", by: "TestRevokedNode, " + here},
	{line: "keelson-controlplane peer-ca list", by: "TestPeerCA, " + here},
	{line: "keelson-controlplane peer-ca create FILE", by: "TestPeerCA, " + here},
	{line: "keelson-controlplane peer-ca trust FILE", by: "TestPeerCA, " + here},
	{line: "keelson-controlplane peer-ca use FILE", by: "TestPeerCA, " + here},
	{line: "keelson-controlplane peer-ca prune", by: "TestPeerCA, " + here},
	{line: "kctl cluster member remove NAME", as: "kctl cluster member remove cp2"},
	{line: "kctl cluster rotate cluster-ca --grace-period 0s", by: "TestTheCAIsExchangedUnderLoad, " + here},
	{line: "kctl cluster rotate --clear-removed NAME", by: "TestAStandbyTakesThePlaceOfADeadReplica, " + here},
	{line: "kctl cluster token create --names w1,w2,... --replace", as: "kctl cluster token create --names w1,w2 --replace"},
	{line: "kctl cluster revoke node/NAME", by: "TestRevokedNode, " + here},
}
